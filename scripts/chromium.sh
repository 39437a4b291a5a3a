#!/bin/sh
# The report's page is tested in a headless Chromium. Does nothing where there is one, else installs Debian's where that is possible.
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" = 0 ]; then as_root=""; else as_root="sudo -n"; fi
if command -v apt-get >/dev/null 2>&1 && { [ -z "$as_root" ] || $as_root true 2>/dev/null; }; then
    $as_root apt-get update -qq && $as_root apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo "There is no Chromium and it could not be installed: the test of the report's page in a browser will be skipped."
exit 0
