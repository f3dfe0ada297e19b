package dlock.peers;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.function.LongSupplier;

/** What was measured, as the line of JSON that benches/peers/run reads. */
final class Report {

    private final Longs waits = new Longs();
    private final List<Long> pairs = new ArrayList<>();
    private long errors;

    void add(Longs of, long count, long failed) {
        waits.addAll(of);
        pairs.add(count);
        errors += failed;
    }

    void print(String workload, double seconds) {
        print(workload, seconds, () -> 0);
    }

    /** {@code done} ends the measurement; {@code check} counts more errors after it. */
    void print(String workload, double seconds, LongSupplier check) {
        System.out.println("done");
        errors += check.getAsLong();
        waits.sort();
        System.out.printf(Locale.ROOT,
                "{\"workload\":\"%s\",\"seconds\":%.3f,\"task_pairs\":%s,\"p50_us\":%.1f,\"p99_us\":%.1f,"
                        + "\"p999_us\":%.1f,\"errors\":%d,\"version\":\"%s\",\"runtime\":\"Java %s\"}%n",
                workload, seconds, pairs, waits.quantile(0.5), waits.quantile(0.99), waits.quantile(0.999), errors,
                implementationVersion(), System.getProperty("java.version"));
    }

    private static String implementationVersion() {
        String path = org.redisson.Redisson.class.getProtectionDomain().getCodeSource().getLocation().getPath();
        return path.replaceAll(".*/redisson-(.*)\\.jar", "$1");
    }
}
