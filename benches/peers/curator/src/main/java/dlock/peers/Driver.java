package dlock.peers;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

/**
 * The workloads of benches/peers/stores.sh with Curator's InterProcessMutex. Arguments: workload, HOST:PORT, tasks, seconds,
 * seconds of warm-up, prefix of the paths.
 *
 * <p>Prints {@code ready}, waits for a line, works, prints {@code done} and one line of JSON, and ends when standard
 * input does.
 */
public final class Driver {

    private static final class Task {
        final List<Long> waits = new ArrayList<>();
        long pairs;
        long errors;
    }

    public static void main(String[] args) throws Exception {
        System.setProperty("org.slf4j.simpleLogger.defaultLogLevel", "warn");
        String workload = args[0];
        if (!List.of("parallel", "contended").contains(workload)) {
            System.exit(3);
        }
        int tasks = Integer.parseInt(args[2]);
        double seconds = Double.parseDouble(args[3]);
        CuratorFramework curator = CuratorFrameworkFactory.newClient(args[1], new ExponentialBackoffRetry(100, 5));
        curator.start();
        List<InterProcessMutex> mutexes = new ArrayList<>();
        for (int i = 0; i < tasks; i++) {
            String name = args[5] + (workload.equals("parallel") ? i : 0);
            mutexes.add(new InterProcessMutex(curator, "/" + name.replace(':', '-')));
        }
        work(mutexes, Double.parseDouble(args[4]));
        System.out.println("ready");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        in.readLine();
        List<Task> done = work(mutexes, seconds);
        System.out.println("done");
        report(workload, seconds, done);
        while (in.readLine() != null) {
            // until the end of standard input
        }
        Runtime.getRuntime().halt(0);
    }

    private static List<Task> work(List<InterProcessMutex> mutexes, double time) throws InterruptedException {
        List<Task> all = new ArrayList<>();
        List<Thread> threads = new ArrayList<>();
        CountDownLatch go = new CountDownLatch(1);
        AtomicLong end = new AtomicLong();
        for (InterProcessMutex mutex : mutexes) {
            Task task = new Task();
            all.add(task);
            Thread thread = new Thread(() -> {
                try {
                    go.await();
                    for (long now = System.nanoTime(); now < end.get(); now = System.nanoTime()) {
                        try {
                            mutex.acquire();
                            task.waits.add(System.nanoTime() - now);
                            mutex.release();
                            task.pairs++;
                        } catch (Exception error) {
                            task.errors++;
                        }
                    }
                } catch (InterruptedException error) {
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

    private static void report(String workload, double seconds, List<Task> done) {
        long[] waits = done.stream().flatMap(task -> task.waits.stream()).mapToLong(Long::longValue).sorted().toArray();
        List<Long> pairs = done.stream().map(task -> task.pairs).toList();
        long errors = done.stream().mapToLong(task -> task.errors).sum();
        String jar = InterProcessMutex.class.getProtectionDomain().getCodeSource().getLocation().getPath();
        System.out.printf(Locale.ROOT,
                "{\"workload\":\"%s\",\"seconds\":%.3f,\"task_pairs\":%s,\"p50_us\":%.1f,\"p99_us\":%.1f,"
                        + "\"p999_us\":%.1f,\"errors\":%d,\"version\":\"%s\",\"runtime\":\"Java %s\"}%n",
                workload, seconds, Arrays.toString(pairs.toArray()), quantile(waits, 0.5), quantile(waits, 0.99),
                quantile(waits, 0.999), errors, jar.replaceAll(".*/curator-recipes-(.*)\\.jar", "$1"),
                System.getProperty("java.version"));
    }

    private static double quantile(long[] sorted, double q) {
        return sorted.length == 0 ? 0 : sorted[Math.min(sorted.length - 1, (int) (sorted.length * q))] / 1e3;
    }
}
