"""The workloads of benches/peers with the lock of redis-py.

Arguments: workload, URL, tasks, seconds, seconds of warm-up, prefix of the keys. Prints "ready", waits for a line,
works, prints "done" and one line of JSON, and ends when standard input does.

Many tasks with keys of their own are asyncio tasks, all else are threads: each was the faster of the two there.
"""

import asyncio
import json
import platform
import random
import sys
import threading
from importlib.metadata import version
from time import perf_counter, perf_counter_ns, sleep

import redis
import redis.asyncio

LEASE = 30
workload, url = sys.argv[1:3]
tasks = int(sys.argv[3])
measured, warmup = float(sys.argv[4]), float(sys.argv[5])
prefix = sys.argv[6]


class Task:
    def __init__(self):
        self.waits = []
        self.pairs = 0
        self.errors = 0


def connect():
    return redis.Redis.from_url(url, max_connections=tasks + 1)


def with_threads(client, seconds):
    done = [Task() for _ in range(tasks)]
    end = perf_counter() + seconds

    def work(number, task):
        name = prefix + (str(number) if workload == "parallel" else "0")
        lock = client.lock(name, timeout=LEASE)
        while perf_counter() < end:
            begin = perf_counter_ns()
            try:
                if not lock.acquire():
                    task.errors += 1
                    continue
                task.waits.append(perf_counter_ns() - begin)
                lock.release()
                task.pairs += 1
            except redis.RedisError:
                task.errors += 1

    threads = [threading.Thread(target=work, args=each) for each in enumerate(done)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


async def with_asyncio(client, seconds):
    done = [Task() for _ in range(tasks)]
    end = perf_counter() + seconds

    async def work(number, task):
        lock = client.lock(prefix + str(number), timeout=LEASE)
        while perf_counter() < end:
            begin = perf_counter_ns()
            try:
                if not await lock.acquire():
                    task.errors += 1
                    continue
                task.waits.append(perf_counter_ns() - begin)
                await lock.release()
                task.pairs += 1
            except redis.RedisError:
                task.errors += 1

    await asyncio.gather(*(work(*each) for each in enumerate(done)))
    return done


def wakeup(mine, theirs, seconds):
    """From the call of release with one client to the return of acquire with the other one, which waits meanwhile."""
    task = Task()
    end = perf_counter() + seconds
    holder = mine.lock(prefix, timeout=LEASE)
    waiter = theirs.lock(prefix, timeout=LEASE, thread_local=False)
    had = []

    def wait():
        waiter.acquire()
        had.append(perf_counter_ns())
        waiter.release()

    while perf_counter() < end:
        holder.acquire()
        thread = threading.Thread(target=wait)
        thread.start()
        sleep(random.uniform(0.02, 0.12))
        released = perf_counter_ns()
        holder.release()
        thread.join()
        task.waits.append(had.pop() - released)
        task.pairs += 1
    return [task]


def ready():
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit(1)


def report(done, how):
    print("done", flush=True)
    waits = sorted(wait for task in done for wait in task.waits)

    def quantile(share):
        return waits[min(len(waits) - 1, int(len(waits) * share))] / 1e3 if waits else 0

    result = {
        "workload": workload,
        "seconds": measured,
        "task_pairs": [task.pairs for task in done],
        "p50_us": quantile(0.5),
        "p99_us": quantile(0.99),
        "p999_us": quantile(0.999),
        "errors": sum(task.errors for task in done),
        "version": version("redis"),
        "runtime": f"Python {platform.python_version()}, hiredis {version('hiredis')}, {how}",
    }
    print(json.dumps(result), flush=True)


async def own_keys():
    client = redis.asyncio.Redis.from_url(url, max_connections=tasks + 1)
    await with_asyncio(client, warmup)
    ready()
    report(await with_asyncio(client, measured), "asyncio")


def main():
    if workload == "parallel" and tasks > 1:
        asyncio.run(own_keys())
    elif workload in ("parallel", "contended"):
        client = connect()
        with_threads(client, warmup)
        ready()
        report(with_threads(client, measured), "threads")
    elif workload == "wakeup":
        mine, theirs = connect(), connect()
        wakeup(mine, theirs, warmup)
        ready()
        report(wakeup(mine, theirs, measured), "threads")
    else:
        sys.exit(3)
    sys.stdin.read()


main()
