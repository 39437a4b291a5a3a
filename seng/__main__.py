"""`python -m seng` is `seng`."""

from seng.lab.cli import main

if __name__ == "__main__":
    main()
