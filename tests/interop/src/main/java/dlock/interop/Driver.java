package dlock.interop;

import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.redisson.Redisson;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Locks with Redisson as it is told to, line by line, over standard input.
 *
 * <p>Request: {@code <id> <thread> <command> <kind> <name> [<argument>...]}, words separated by one space and
 * percent-encoded. Answer: one JSON object, {@code {"id":…,"value":…,"took_us":…,"done_us":…,"holder":…}}, or with
 * {@code "error"} (the exception's class) and {@code "message"} instead of {@code "value"}. {@code took_us} is the
 * duration of the Redisson call, {@code done_us} the wall clock in microseconds at its end, {@code holder} the
 * {@code uuid:thread} as which Redisson writes this thread into its hashes.
 *
 * <p>Owners of Redisson are threads, so every thread of a request is a Java thread of its own that lives as long as
 * the process: requests of one thread run one after the other, those of different threads overlap.
 *
 * <p>{@code <id> <thread> quit}, like the end of standard input, ends the process at once and leaves its locks to
 * their leases, as a crash would.
 */
public final class Driver {

    private final RedissonClient redisson;
    private final Commands commands;
    private final PrintStream out;
    private final Map<String, ExecutorService> threads = new HashMap<>();

    private Driver(RedissonClient redisson, PrintStream out) {
        this.redisson = redisson;
        this.commands = new Commands(redisson);
        this.out = out;
    }

    /** Arguments: the URL, then {@code option=milliseconds} as {@link Settings} knows them. */
    public static void main(String[] args) throws IOException {
        // Standard output belongs to the answers: whatever a library prints goes to standard error.
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        System.setProperty("org.slf4j.simpleLogger.defaultLogLevel", "warn");
        System.setProperty("org.slf4j.simpleLogger.showDateTime", "true");
        System.setProperty("org.slf4j.simpleLogger.dateTimeFormat", "HH:mm:ss.SSS");

        try {
            Config config = Settings.parse(args[0], Arrays.asList(args).subList(1, args.length));
            Driver driver = new Driver(Redisson.create(config), out);
            driver.print("ready " + driver.redisson.getId());
            driver.serve(new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)));
            Runtime.getRuntime().halt(0);
        } catch (Throwable e) {
            // The causes say it all (refused, no password, …); the stack traces would bury them.
            for (Throwable cause = e; cause != null; cause = cause.getCause()) {
                System.err.println(cause);
            }
            Runtime.getRuntime().halt(1);
        }
    }

    private void serve(BufferedReader requests) throws IOException {
        String line;
        while ((line = requests.readLine()) != null) {
            List<String> words = Arrays.stream(line.split(" ", -1))
                    .map(word -> URLDecoder.decode(word, StandardCharsets.UTF_8))
                    .toList();
            String id = words.get(0);
            String thread = words.get(1);
            List<String> command = words.subList(2, words.size());
            if (command.get(0).equals("quit")) {
                print("{\"id\":" + Json.of(id) + ",\"value\":null,\"took_us\":0,\"done_us\":" + epochMicros() + "}");
                return;
            }
            threads.computeIfAbsent(thread, name -> Executors.newSingleThreadExecutor(run -> {
                Thread worker = new Thread(run, "worker-" + name);
                worker.setDaemon(true);
                return worker;
            })).execute(() -> print(answer(id, command)));
        }
    }

    private String answer(String id, List<String> command) {
        long start = System.nanoTime();
        String outcome;
        try {
            outcome = "\"value\":" + Json.of(commands.run(command));
        } catch (Throwable e) {
            outcome = "\"error\":" + Json.of(e.getClass().getSimpleName())
                    + ",\"message\":" + Json.of(String.valueOf(e.getMessage()));
        }
        long tookMicros = (System.nanoTime() - start) / 1_000;
        long doneMicros = epochMicros();
        return "{\"id\":" + Json.of(id) + "," + outcome + ",\"took_us\":" + tookMicros + ",\"done_us\":" + doneMicros
                + ",\"holder\":" + Json.of(redisson.getId() + ":" + Thread.currentThread().getId()) + "}";
    }

    private void print(String line) {
        synchronized (out) {
            out.println(line);
        }
    }

    private static long epochMicros() {
        return ChronoUnit.MICROS.between(Instant.EPOCH, Instant.now());
    }
}
