#!/bin/sh
# tests/java.sh PROJECT [--check]: builds the Java driver of a folder beside this script into its target/classes and
# target/lib. Does nothing when the sources have not changed since; safe to call from many processes at once. `--check` only
# says by its exit code whether there is nothing to do.
set -eu
cd "$(dirname "$0")/$1"

sources=$(find pom.xml ../java.sh src -type f | LC_ALL=C sort | xargs sha256sum | sha256sum)
is_built() { [ "$(cat target/built 2>/dev/null)" = "$sources" ]; }

if is_built; then exit 0; fi
if [ "${2:-}" = --check ]; then exit 1; fi

mkdir -p target ../interop/target
# one lock for all of them: Maven's own folder is not made for several at a time
exec 9>../interop/target/lock
flock 9
if is_built; then exit 0; fi

rm -rf target/built target/classes target/lib
# The two goals by name: the whole life cycle would fetch four more plugins. What an earlier build fetched is enough
# without a network; on a fresh machine the offline try fails at once and the second one fetches.
build() { mvn -q -B -Dstyle.color=never "$@" compiler:compile dependency:copy-dependencies; }
build --offline >target/offline.log 2>&1 || build >&2
echo "$sources" >target/built
