package dlock.curator;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.framework.recipes.locks.InterProcessSemaphoreV2;
import org.apache.curator.framework.recipes.locks.Lease;
import org.apache.curator.framework.recipes.shared.SharedCount;
import org.apache.curator.retry.ExponentialBackoffRetry;

/**
 * Locks with Curator as it is told to, line by line, over standard input.
 *
 * <p>Request: {@code <id> <thread> <command> [<argument>...]}. Answer: {@code <id> <value>}, or {@code <id> !<exception>}.
 * Curator's owners are threads, so every thread of a request is a Java thread of its own. The end of standard input ends the
 * process at once and leaves its session to time.
 */
public final class Driver {

    private final CuratorFramework curator;
    private final Map<String, ExecutorService> threads = new ConcurrentHashMap<>();
    private final Map<String, InterProcessMutex> mutexes = new ConcurrentHashMap<>();
    private final Map<String, InterProcessReadWriteLock> readWrite = new ConcurrentHashMap<>();
    private final Map<String, InterProcessSemaphoreV2> semaphores = new ConcurrentHashMap<>();
    private final Map<String, SharedCount> counts = new ConcurrentHashMap<>();
    /** By thread and path. */
    private final Map<String, Collection<Lease>> leases = new ConcurrentHashMap<>();

    private Driver(CuratorFramework curator) {
        this.curator = curator;
    }

    /** Arguments: the servers, and the session in milliseconds. */
    public static void main(String[] args) throws Exception {
        CuratorFramework curator = CuratorFrameworkFactory.builder()
                .connectString(args[0])
                .sessionTimeoutMs(Integer.parseInt(args[1]))
                .retryPolicy(new ExponentialBackoffRetry(50, 8))
                .build();
        curator.start();
        if (!curator.blockUntilConnected(60, TimeUnit.SECONDS)) {
            System.err.println("no server answers");
            Runtime.getRuntime().halt(1);
        }
        Driver driver = new Driver(curator);
        print("ready");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        String line;
        while ((line = in.readLine()) != null) {
            List<String> words = List.of(line.split(" "));
            driver.threads
                    .computeIfAbsent(words.get(1), name -> Executors.newSingleThreadExecutor())
                    .execute(() -> print(words.get(0) + " " + driver.answer(words.subList(2, words.size()))));
        }
        Runtime.getRuntime().halt(0);
    }

    private String answer(List<String> words) {
        try {
            return String.valueOf(run(words));
        } catch (Throwable e) {
            return "!" + e.getClass().getSimpleName();
        }
    }

    private Object run(List<String> words) throws Exception {
        String command = words.get(0);
        switch (command) {
            case "acquire":
                return lock(words.get(1), words.get(2)).acquire(Long.parseLong(words.get(3)), TimeUnit.MILLISECONDS);
            case "release":
                lock(words.get(1), words.get(2)).release();
                return true;
            case "take": {
                Collection<Lease> taken = semaphore(words.get(1), Integer.parseInt(words.get(2)))
                        .acquire(Integer.parseInt(words.get(3)), Long.parseLong(words.get(4)), TimeUnit.MILLISECONDS);
                if (taken != null) {
                    leases.put(Thread.currentThread().getName() + words.get(1), taken);
                }
                return taken != null;
            }
            case "give":
                semaphore(words.get(1), 0).returnAll(leases.remove(Thread.currentThread().getName() + words.get(1)));
                return true;
            case "total":
                return count(words.get(1)).getCount();
            case "set":
                count(words.get(1)).setCount(Integer.parseInt(words.get(2)));
                return true;
            case "write":
                // As the holder whose node is given: path and version, then the node to write and its data.
                curator.transaction().forOperations(
                        curator.transactionOp().check()
                                .withVersion(Integer.parseInt(words.get(2))).forPath(words.get(1)),
                        curator.transactionOp().setData()
                                .forPath(words.get(3), words.get(4).getBytes(StandardCharsets.UTF_8)));
                return true;
            case "create":
                curator.create().creatingParentsIfNeeded().forPath(words.get(1), new byte[0]);
                return true;
            default:
                throw new IllegalArgumentException(command);
        }
    }

    private InterProcessMutex lock(String kind, String path) {
        switch (kind) {
            case "mutex":
                return mutexes.computeIfAbsent(path, name -> new InterProcessMutex(curator, name));
            case "read":
                return readWrite.computeIfAbsent(path, name -> new InterProcessReadWriteLock(curator, name)).readLock();
            case "write":
                return readWrite.computeIfAbsent(path, name -> new InterProcessReadWriteLock(curator, name)).writeLock();
            default:
                throw new IllegalArgumentException(kind);
        }
    }

    /** With a total of 0 its total is the shared count that dlock keeps. */
    private InterProcessSemaphoreV2 semaphore(String path, int total) throws Exception {
        InterProcessSemaphoreV2 known = semaphores.get(path);
        if (known == null) {
            known = total > 0
                    ? new InterProcessSemaphoreV2(curator, path, total)
                    : new InterProcessSemaphoreV2(curator, path, count(path));
            semaphores.put(path, known);
        }
        return known;
    }

    private SharedCount count(String path) throws Exception {
        SharedCount known = counts.get(path);
        if (known == null) {
            known = new SharedCount(curator, path + "/permits", 0);
            known.start();
            counts.put(path, known);
        }
        return known;
    }

    private static synchronized void print(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
