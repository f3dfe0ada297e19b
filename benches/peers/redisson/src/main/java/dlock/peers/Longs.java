package dlock.peers;

import java.util.Arrays;

/** A list of nanoseconds without a box around each. */
final class Longs {

    private long[] values = new long[1 << 12];
    private int size;

    void add(long value) {
        if (size == values.length) {
            values = Arrays.copyOf(values, size * 2);
        }
        values[size++] = value;
    }

    void addAll(Longs other) {
        for (int i = 0; i < other.size; i++) {
            add(other.values[i]);
        }
    }

    int size() {
        return size;
    }

    void sort() {
        Arrays.sort(values, 0, size);
    }

    /** In microseconds; the list must be sorted. */
    double quantile(double q) {
        return size == 0 ? 0 : values[Math.min(size - 1, (int) (size * q))] / 1e3;
    }
}
