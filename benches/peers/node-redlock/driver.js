// The workloads of benches/peers with redlock. Arguments: workload, URL, tasks, seconds, seconds of warm-up, prefix of
// the keys.
//
// Prints "ready", waits for a line, works, prints "done" and one line of JSON, and ends when standard input does.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { Redis } from "ioredis";
import Redlock from "redlock";

const LEASE = 30_000;
const [workload, url] = process.argv.slice(2);
const tasks = Number(process.argv[4]);
const measured = Number(process.argv[5]) * 1000;
const warmup = Number(process.argv[6]) * 1000;
const prefix = process.argv[7];
const clients = [];

// ioredis recommends its automatic pipelining for many calls at once; a single task is slower with it.
function connect() {
  const client = new Redis(url, { enableAutoPipelining: tasks > 1 });
  clients.push(client);
  return new Redlock([client]);
}

const newTask = () => ({ waits: [], pairs: 0, errors: 0 });
const sleep = (time) => new Promise((resolve) => setTimeout(resolve, time));

function pairs(redlock, time) {
  const end = performance.now() + time;
  const work = async (number) => {
    const task = newTask();
    const key = prefix + (workload === "parallel" ? number : 0);
    for (let begin = performance.now(); begin < end; begin = performance.now()) {
      try {
        const lock = await redlock.acquire([key], LEASE);
        task.waits.push(performance.now() - begin);
        await lock.release();
        task.pairs++;
      } catch {
        task.errors++;
      }
    }
    return task;
  };
  return Promise.all(Array.from({ length: tasks }, (_, number) => work(number)));
}

// From the call of release with one client to the end of acquire with the other one, which waits meanwhile.
async function wakeup(mine, theirs, time) {
  const task = newTask();
  const wait = async () => {
    const lock = await theirs.acquire([prefix], LEASE);
    const had = performance.now();
    await lock.release();
    return had;
  };
  for (const end = performance.now() + time; performance.now() < end; ) {
    try {
      const lock = await mine.acquire([prefix], LEASE);
      const waiter = wait();
      await sleep(20 + Math.random() * 100);
      const released = performance.now();
      await lock.release();
      task.waits.push((await waiter) - released);
      task.pairs++;
    } catch {
      task.errors++;
    }
  }
  return [task];
}

function report(done) {
  const waits = Float64Array.from(done.flatMap((task) => task.waits)).sort();
  const quantile = (share) => (waits.length ? waits[Math.min(waits.length - 1, Math.floor(waits.length * share))] * 1000 : 0);
  const locked = createRequire(import.meta.url)("./package-lock.json").packages;
  console.log(
    JSON.stringify({
      workload,
      seconds: measured / 1000,
      task_pairs: done.map((task) => task.pairs),
      p50_us: quantile(0.5),
      p99_us: quantile(0.99),
      p999_us: quantile(0.999),
      errors: done.reduce((sum, task) => sum + task.errors, 0),
      version: locked["node_modules/redlock"].version,
      runtime: `Node ${process.versions.node}, ioredis ${locked["node_modules/ioredis"].version}`,
    }),
  );
}

let measure;
if (workload === "parallel" || workload === "contended") {
  const redlock = connect();
  measure = (time) => pairs(redlock, time);
} else if (workload === "wakeup") {
  const [mine, theirs] = [connect(), connect()];
  measure = (time) => wakeup(mine, theirs, time);
} else {
  process.exit(3);
}
const input = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
await measure(warmup);
console.log("ready");
if ((await input.next()).done) {
  process.exit(1);
}
const done = await measure(measured);
console.log("done");
report(done);
await input.next();
for (const client of clients) {
  client.disconnect();
}
