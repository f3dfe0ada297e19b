#!/usr/bin/env bash
# Makes a headless Chromium and its driver available to the tests, and installs what is missing.
#
# Source it (as tests/run does): it exports DLOCK_CHROMIUM and DLOCK_CHROMEDRIVER, or returns 1 after one message.
# Run it: it prints the two lines to export.
#
# Where they come from: the variables, the PATH; else the distribution's packages chromium and chromium-driver. The two
# have to be of the same version, and the tests also need setpriv (util-linux), so that both die with them.

# shellcheck source=fetch.sh
source "$(dirname "${BASH_SOURCE[0]}")/fetch.sh"

# browser_find VARIABLE PROGRAM...: sets and exports the variable, to what it names already or the first program found.
browser_find() {
    local variable=$1 path=${!1:-} program
    shift
    for program in "$@"; do
        [ -n "$path" ] || path=$(command -v "$program")
    done
    [ -n "$path" ] && "$path" --version >/dev/null 2>&1 && export "$variable=$path"
}

browser_both() {
    browser_find DLOCK_CHROMIUM chromium chromium-browser google-chrome && browser_find DLOCK_CHROMEDRIVER chromedriver
}

browser_main() {
    browser_both && return
    # what the user has named and does not run must not be covered up by another one
    if [ -z "${DLOCK_CHROMIUM:-}${DLOCK_CHROMEDRIVER:-}" ]; then
        fetch_packages chromium chromium-driver && browser_both && return
    fi
    printf '%s: set DLOCK_CHROMIUM and DLOCK_CHROMEDRIVER to the paths of the two\n' \
        'no Chromium with its chromedriver runs here, and none could be installed' >&2
    return 1
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    browser_main || exit
    printf 'export %s=%q\n' DLOCK_CHROMIUM "$DLOCK_CHROMIUM" DLOCK_CHROMEDRIVER "$DLOCK_CHROMEDRIVER"
else
    browser_main
fi
