#!/usr/bin/env bash
# The races of docs/race.md, each by its name: bash benchmarks/race.sh e8 t94 b2048 gpt autoencoder ablation step
# On a GPU, with the data in ./data or $SENG_DATA. Searches share the GPU (JOBS processes); what is timed runs alone. Searches that are
# done are not done again; what they found is run again. Races of equal time measure first: to repeat one, remove its label's studies.
set -euo pipefail
seng="python3 -m seng" jobs=${JOBS:-6}

epochs_in() { # TASK SECONDS OPTIMIZER…: sets `each` to "optimizer epochs" of what they train in that time
    local found
    found=$(python3 benchmarks/epochs_in.py "$1" "$2" --optimizers "${@:3}" | awk '{print $1, $2}')
    mapfile -t each <<<"$found"
}

for race in "$@"; do
    case $race in
    e8) # accuracy after eight epochs, and the time of a step
        $seng tune cifar10-resnet18 --optimizers seng seng-muon muon sgd --label e8 --epochs 8 --trials 8 --jobs "$jobs"
        $seng compare cifar10-resnet18 --optimizers seng seng-muon muon sgd --label e8 --epochs 8 --no-stop --again
        ;;
    t94) # seconds to 94 %, with the recipes of e8
        $seng compare cifar10-resnet18 --optimizers seng seng-muon muon --tuned e8 --label e16 --epochs 16 --again
        $seng compare cifar10-resnet18 --optimizers sgd --tuned e8 --label e40 --epochs 40 --again
        ;;
    b2048)
        $seng tune cifar10-resnet18 --optimizers seng seng-muon muon sgd --label b2048 --batch 2048 --epochs 8 --trials 8 --jobs "$jobs"
        $seng compare cifar10-resnet18 --optimizers seng seng-muon muon sgd --label b2048 --batch 2048 --epochs 16 --no-stop --again
        ;;
    gpt) # at equal steps, and in the time that seng-muon takes
        $seng tune shakespeare-gpt --optimizers seng seng-muon adamw muon soap --label search --trials 16 --jobs "$jobs"
        $seng compare shakespeare-gpt --optimizers seng seng-muon adamw muon soap --label search --no-stop --again
        ours=$(tail -qn 1 results/shakespeare-gpt/seng-muon-search-?.jsonl | sed 's/.*"seconds": \([0-9.]*\).*/\1/' | awk '{s += $1} END {print s / NR}')
        epochs_in shakespeare-gpt "$ours" adamw muon soap
        for row in "${each[@]}"; do
            read -r name epochs <<<"$row"
            $seng compare shakespeare-gpt --optimizers "$name" --tuned search --label time --epochs "$epochs" --no-stop --again
        done
        ;;
    autoencoder) # in four seconds; every optimizer is tuned with as many epochs as it trains in them
        epochs_in mnist-autoencoder 4 seng adam kfac
        for row in "${each[@]}"; do
            read -r name epochs <<<"$row"
            $seng tune mnist-autoencoder --optimizers "$name" --label time --epochs "$epochs" --trials 8 --jobs "$jobs"
            $seng compare mnist-autoencoder --optimizers "$name" --label time --epochs "$epochs" --no-stop --again
        done
        ;;
    ablation) python3 benchmarks/ablation.py --jobs "$jobs" --out results/ablation.json ;;
    step) python3 benchmarks/profile_step.py --model resnet18 ;;
    *) echo "race.sh: there is no race $race: e8 t94 b2048 gpt autoencoder ablation step" >&2 && exit 1 ;;
    esac
done
