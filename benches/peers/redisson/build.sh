#!/bin/sh
# Compiles the driver into target/classes and collects its jars in target/lib.
set -eu
cd "$(dirname "$0")"
# The two goals by name: the whole life cycle would fetch four more plugins. What an earlier build fetched is enough
# without a network; on a fresh machine the offline try fails at once and the second one fetches.
build() { mvn -q -B -Dstyle.color=never "$@" compiler:compile dependency:copy-dependencies; }
mkdir -p target
build --offline >target/offline.log 2>&1 || build >&2
