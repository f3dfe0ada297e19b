#!/usr/bin/env bash
# Measures dlock beside what people lock with on etcd, ZooKeeper and PostgreSQL, in turns, on servers that it starts for
# that, and makes the page BENCHMARKS.md from the results.
#
#   benches/peers/stores.sh                      all three, three rounds of 4 s: about five minutes
#   benches/peers/stores.sh --store etcd         one of them, also several times
#   benches/peers/stores.sh --rounds N --seconds S
#
# The servers keep their data on the disk of the temporary directory (TMPDIR) and wait for it, as they do by default. Nothing
# else should run on the machine meanwhile. It needs what scripts/servers.sh installs, Java 17 and Maven, and Go 1.25.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
peers=benches/peers

stores=()
measure=()
while [ $# -gt 0 ]; do
    case $1 in
    --store) stores+=("${2:-}") ;;
    --rounds | --seconds) measure+=("$1" "${2:-}") ;;
    *) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2 && exit 2 ;;
    esac
    shift 2
done
[ ${#stores[@]} != 0 ] || stores=(etcd zookeeper postgres)

# shellcheck source=../../scripts/servers.sh
source scripts/servers.sh
cargo build --quiet -p dlock-peers
cargo build --quiet --release -p dlock-cli --all-features
runner=${CARGO_TARGET_DIR:-target}/debug/dlock-peers
dlock=${CARGO_TARGET_DIR:-target}/release/dlock

dir=$(mktemp -d)
chmod 755 "$dir"
server=
finish() {
    [ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null || true
    rm -rf "$dir"
}
trap finish EXIT

# free_port: prints a port that nothing listens on.
free_port() {
    local port
    while port=$((20000 + RANDOM % 10000)); (: </dev/tcp/127.0.0.1/$port) 2>/dev/null; do :; done
    printf '%s\n' "$port"
}

# start PORT COMMAND...: starts a server and waits until it listens.
start() {
    local port=$1
    shift
    "$@" >"$dir/log" 2>&1 &
    server=$!
    for _ in {1..600}; do
        (: </dev/tcp/127.0.0.1/$port) 2>/dev/null && sleep 3 && return
        sleep 0.1
    done
    cat "$dir/log" >&2
    return 1
}

# as_nobody COMMAND...: PostgreSQL refuses root.
as_nobody() {
    if [ "$(id -u)" = 0 ]; then
        setpriv --reuid=nobody --regid=nogroup --clear-groups "$@"
    else
        "$@"
    fi
}

etcd() {
    (cd $peers/etcd-go && go build -mod=readonly -o target/driver .)
    local port peer
    port=$(free_port) peer=$(free_port)
    start "$port" "$DLOCK_ETCD_SERVER" --data-dir "$dir/etcd" --listen-client-urls "http://127.0.0.1:$port" \
        --advertise-client-urls "http://127.0.0.1:$port" --listen-peer-urls "http://127.0.0.1:$peer" \
        --initial-advertise-peer-urls "http://127.0.0.1:$peer" --initial-cluster "default=http://127.0.0.1:$peer"
    version="etcd $("$DLOCK_ETCD_SERVER" --version | sed -n 's/^etcd Version: //p')"
    address=127.0.0.1:$port
    url="etcd://$address/?allow_old_server=true"
}

zookeeper() {
    (cd $peers/curator && mvn -q -B -Dstyle.color=never compiler:compile dependency:copy-dependencies)
    local port jar=${DLOCK_ZOOKEEPER_JAR:-/usr/share/java/zookeeper.jar}
    port=$(free_port)
    printf '%s\n' 'tickTime=2000' "dataDir=$dir/zookeeper" "clientPort=$port" 'clientPortAddress=127.0.0.1' \
        'maxClientCnxns=0' 'admin.enableServer=false' 'extendedTypesEnabled=true' >"$dir/zoo.cfg"
    start "$port" java -Xmx512m -Dzookeeper.admin.enableServer=false -cp "$jar" \
        org.apache.zookeeper.server.quorum.QuorumPeerMain "$dir/zoo.cfg"
    exec 3<>"/dev/tcp/127.0.0.1/$port"
    printf srvr >&3
    version="ZooKeeper $(sed -n 's/^Zookeeper version: \([0-9.]*\).*/\1/p' <&3)"
    exec 3>&-
    address=127.0.0.1:$port
    url="zookeeper://$address/peers"
}

postgres() {
    (cd $peers/postgres-rows && env -u CARGO_TARGET_DIR cargo build --quiet --release --locked)
    local port data=$dir/postgres
    port=$(free_port)
    mkdir "$data" && chmod 700 "$data"
    [ "$(id -u)" != 0 ] || chown nobody:nogroup "$data"
    as_nobody "$DLOCK_POSTGRES_BIN/initdb" --pgdata "$data" --username=dlock --auth=trust --encoding=UTF8 --locale=C \
        --no-instructions >/dev/null
    start "$port" as_nobody "$DLOCK_POSTGRES_BIN/postgres" -D "$data" -p "$port" -k '' -c listen_addresses=127.0.0.1 \
        -c max_connections=200
    version="PostgreSQL $("$DLOCK_POSTGRES_BIN/postgres" --version | sed 's/.*) \([0-9.]*\).*/\1/')"
    address="postgres://dlock@127.0.0.1:$port/postgres"
    url="$address?create_table=true"
}

for store in "${stores[@]}"; do
    case $store in
    etcd | zookeeper | postgres) "$store" ;;
    *) printf -- '--store is etcd, zookeeper or postgres\n' >&2 && exit 2 ;;
    esac
    "$runner" store --store "$store" --server "$version" --address "$address" --url "$url" --dlock "$dlock" \
        --day "$(date -u +%F)" "${measure[@]}" --out "$peers/stores/$store.json"
    kill "$server" && wait "$server" || true
    server=
done
exec "$runner" report
