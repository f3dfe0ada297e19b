package dlock.peers;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * The workloads of benches/peers with Redisson. Arguments: workload, URL, tasks, seconds, seconds of warm-up, prefix of
 * the keys, holds. With {@code -Ddefaults=true} Redisson's own settings are left as they are.
 *
 * <p>Prints {@code ready}, waits for a line, works, prints {@code done} and one line of JSON, and ends when standard
 * input does.
 */
public final class Driver {

    /** A third of the default lease. */
    private static final long PERIOD_MILLIS = 10_000;

    private final String workload;
    private final String url;
    private final int tasks;
    private final double seconds;
    private final double warmup;
    private final String prefix;
    private final int holds;
    private final BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
    private final RedissonClient redisson;

    private Driver(String[] args) {
        workload = args[0];
        url = args[1];
        tasks = Integer.parseInt(args[2]);
        seconds = Double.parseDouble(args[3]);
        warmup = Double.parseDouble(args[4]);
        prefix = args[5];
        holds = Integer.parseInt(args[6]);
        redisson = connect();
    }

    public static void main(String[] args) throws Exception {
        System.setProperty("org.slf4j.simpleLogger.defaultLogLevel", "warn");
        Driver driver = new Driver(args);
        switch (driver.workload) {
            case "parallel", "contended", "fair" -> driver.pairs();
            case "wakeup" -> driver.wakeup();
            case "held" -> driver.held();
            default -> System.exit(3);
        }
        while (driver.in.readLine() != null) {
            // until the end of standard input
        }
        Runtime.getRuntime().halt(0);
    }

    private RedissonClient connect() {
        Config config = new Config();
        config.useSingleServer().setAddress(url);
        if (!Boolean.getBoolean("defaults")) {
            // As many connections as can be in use at once, from the start, and two threads for each core: on two cores
            // that was faster than the default 32 wherever there are many tasks.
            config.setNettyThreads(0);
            config.useSingleServer().setConnectionMinimumIdleSize(Math.max(1, Math.min(64, tasks)));
        }
        return Redisson.create(config);
    }

    private RLock lock(RedissonClient client, String name) {
        return workload.equals("fair") ? client.getFairLock(name) : client.getLock(name);
    }

    private void pairs() throws Exception {
        work(warmup);
        ready();
        List<Task> done = work(seconds);
        Report report = new Report();
        done.forEach(task -> report.add(task.waits, task.pairs, task.errors));
        report.print(workload, seconds);
    }

    private static final class Task {
        final Longs waits = new Longs();
        long pairs;
        long errors;
    }

    private List<Task> work(double time) throws InterruptedException {
        List<Task> all = new ArrayList<>();
        List<Thread> threads = new ArrayList<>();
        CountDownLatch go = new CountDownLatch(1);
        AtomicLong end = new AtomicLong();
        for (int i = 0; i < tasks; i++) {
            Task task = new Task();
            all.add(task);
            RLock lock = lock(redisson, prefix + (workload.equals("parallel") ? i : 0));
            Thread thread = new Thread(() -> {
                try {
                    go.await();
                    for (long now = System.nanoTime(); now < end.get();) {
                        try {
                            lock.lock();
                            task.waits.add(System.nanoTime() - now);
                            lock.unlock();
                            task.pairs++;
                        } catch (RuntimeException e) {
                            task.errors++;
                        }
                        now = System.nanoTime();
                    }
                } catch (InterruptedException e) {
                    Thread.currentThread().interrupt();
                }
            });
            thread.start();
            threads.add(thread);
        }
        end.set(System.nanoTime() + (long) (time * 1e9));
        go.countDown();
        for (Thread thread : threads) {
            thread.join();
        }
        return all;
    }

    private void wakeup() throws Exception {
        RedissonClient other = connect();
        wake(other, warmup);
        ready();
        Longs waits = wake(other, seconds);
        Report report = new Report();
        report.add(waits, waits.size(), 0);
        report.print(workload, seconds);
    }

    /** From the call of unlock in one client to the return of lock in the other one, which waits meanwhile. */
    private Longs wake(RedissonClient other, double time) throws InterruptedException {
        Longs waits = new Longs();
        RLock mine = redisson.getLock(prefix);
        RLock theirs = other.getLock(prefix);
        Semaphore turn = new Semaphore(0);
        Semaphore had = new Semaphore(0);
        AtomicLong at = new AtomicLong();
        Thread waiter = new Thread(() -> {
            while (true) {
                turn.acquireUninterruptibly();
                if (at.get() < 0) {
                    return;
                }
                theirs.lock();
                at.set(System.nanoTime());
                theirs.unlock();
                had.release();
            }
        });
        waiter.start();
        for (long end = System.nanoTime() + (long) (time * 1e9); System.nanoTime() < end;) {
            mine.lock();
            turn.release();
            TimeUnit.MICROSECONDS.sleep(ThreadLocalRandom.current().nextLong(20_000, 120_000));
            long released = System.nanoTime();
            mine.unlock();
            had.acquireUninterruptibly();
            waits.add(at.get() - released);
        }
        at.set(-1);
        turn.release();
        waiter.join();
        return waits;
    }

    private void held() throws Exception {
        Semaphore slots = new Semaphore(64);
        AtomicLong errors = new AtomicLong();
        long begin = System.nanoTime();
        List<CompletableFuture<?>> pending = new ArrayList<>();
        for (int i = 0; i < holds; i++) {
            slots.acquireUninterruptibly();
            CompletionStage<Void> held = redisson.getLock(prefix + i).lockAsync(1);
            pending.add(held.toCompletableFuture().whenComplete((none, error) -> {
                slots.release();
                if (error != null) {
                    errors.incrementAndGet();
                }
            }));
        }
        CompletableFuture.allOf(pending.toArray(CompletableFuture[]::new)).handle((a, b) -> null).join();
        pending.clear();
        // All are renewed together, ten seconds after the first was taken and so on. The measurement begins between two
        // renewals, so that whole ones are in it.
        long sinceRenewal = (System.nanoTime() - begin) / 1_000_000 % PERIOD_MILLIS;
        Thread.sleep((PERIOD_MILLIS * 3 / 2 - sinceRenewal) % PERIOD_MILLIS);
        ready();
        Thread.sleep((long) (seconds * 1000));
        Report report = new Report();
        report.print(workload, seconds, () -> {
            for (int i = 0; i < holds; i += 97) {
                if (!redisson.getLock(prefix + i).isHeldByThread(1)) {
                    errors.incrementAndGet();
                }
            }
            return errors.get();
        });
    }

    private void ready() throws Exception {
        System.out.println("ready");
        if (in.readLine() == null) {
            System.exit(1);
        }
    }
}
