package dlock.interop;

import static java.util.concurrent.TimeUnit.MILLISECONDS;

import java.util.Arrays;
import java.util.List;
import java.util.concurrent.locks.LockSupport;
import org.redisson.api.RBucket;
import org.redisson.api.RCountDownLatch;
import org.redisson.api.RFencedLock;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RSemaphore;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.LongCodec;

/**
 * What can be asked for, under Redisson's own method names: {@code <method> <kind> <name> [<argument>...]}, times in
 * milliseconds.
 *
 * <p>Kinds: {@code plain}, {@code fair}, {@code read}, {@code write}, {@code fenced}; {@code multi}, whose name is
 * those of several plain locks with a comma between them; {@code semaphore}, {@code permits} (the semaphore whose
 * permits expire), {@code latch}. A method that may fail to get what it is asked for answers {@code false} then,
 * otherwise {@code true}, the fencing token or the permit's id.
 *
 * <p>Objects are made anew for every request: Redisson keeps the last lease in the lock object, and one request
 * shall not change what the next one does.
 */
final class Commands {

    private final RedissonClient redisson;

    Commands(RedissonClient redisson) {
        this.redisson = redisson;
    }

    Object run(List<String> request) throws InterruptedException {
        String method = request.get(0);
        String kind = request.get(1);
        String name = request.get(2);
        Arguments args = new Arguments(request.subList(3, request.size()));
        if (method.equals("counter")) {
            return counter(kind, name, args.number(0), args.text(1), args.number(2));
        }
        return switch (kind) {
            case "plain", "fair", "read", "write", "multi" -> lock(lockOf(kind, name), method, args);
            case "fenced" -> fenced(redisson.getFencedLock(name), method, args);
            case "semaphore" -> semaphore(redisson.getSemaphore(name), method, args);
            case "permits" -> permits(redisson.getPermitExpirableSemaphore(name), method, args);
            case "latch" -> latch(redisson.getCountDownLatch(name), method, args);
            default -> throw new IllegalArgumentException("no kind " + kind);
        };
    }

    private RLock lockOf(String kind, String name) {
        return switch (kind) {
            case "plain" -> redisson.getLock(name);
            case "fair" -> redisson.getFairLock(name);
            case "read" -> redisson.getReadWriteLock(name).readLock();
            case "write" -> redisson.getReadWriteLock(name).writeLock();
            case "fenced" -> redisson.getFencedLock(name);
            case "multi" -> redisson.getMultiLock(
                    Arrays.stream(name.split(",")).map(redisson::getLock).toArray(RLock[]::new));
            default -> throw new IllegalArgumentException("no kind of lock " + kind);
        };
    }

    /**
     * {@code lock [lease]}, {@code tryLock wait lease} (a lease of -1 is renewed), and those without arguments;
     * {@code lockAs id lease} and {@code unlockAs id}, whose holder is not this thread: the reactive API draws ids at
     * random, and half of them are negative.
     */
    private static Object lock(RLock lock, String method, Arguments args) throws InterruptedException {
        switch (method) {
            case "lock" -> {
                if (args.none()) {
                    lock.lock();
                } else {
                    lock.lock(args.number(0), MILLISECONDS);
                }
                return true;
            }
            case "tryLock" -> {
                return args.none() ? lock.tryLock() : lock.tryLock(args.number(0), args.number(1), MILLISECONDS);
            }
            case "unlock" -> {
                lock.unlock();
                return true;
            }
            case "lockAs" -> {
                lock.lockAsync(args.number(1), MILLISECONDS, args.number(0)).toCompletableFuture().join();
                return true;
            }
            case "unlockAs" -> {
                lock.unlockAsync(args.number(0)).toCompletableFuture().join();
                return true;
            }
            case "isLocked" -> {
                return lock.isLocked();
            }
            case "isHeldByCurrentThread" -> {
                return lock.isHeldByCurrentThread();
            }
            case "getHoldCount" -> {
                return lock.getHoldCount();
            }
            case "remainTimeToLive" -> {
                return lock.remainTimeToLive();
            }
            case "forceUnlock" -> {
                return lock.forceUnlock();
            }
            default -> throw unknown(method);
        }
    }

    private static Object fenced(RFencedLock lock, String method, Arguments args) throws InterruptedException {
        return switch (method) {
            case "lock" -> args.none()
                    ? lock.lockAndGetToken()
                    : lock.lockAndGetToken(args.number(0), MILLISECONDS);
            case "tryLock" -> orFalse(args.none()
                    ? lock.tryLockAndGetToken()
                    : lock.tryLockAndGetToken(args.number(0), args.number(1), MILLISECONDS));
            case "getToken" -> lock.getToken();
            default -> lock(lock, method, args);
        };
    }

    /** {@code acquire [permits]}, {@code tryAcquire permits wait}, {@code release [permits]}. */
    private static Object semaphore(RSemaphore semaphore, String method, Arguments args) throws InterruptedException {
        switch (method) {
            case "trySetPermits" -> {
                return semaphore.trySetPermits((int) args.number(0));
            }
            case "addPermits" -> {
                semaphore.addPermits((int) args.number(0));
                return true;
            }
            case "acquire" -> {
                semaphore.acquire(args.none() ? 1 : (int) args.number(0));
                return true;
            }
            case "tryAcquire" -> {
                return semaphore.tryAcquire((int) args.number(0), args.number(1), MILLISECONDS);
            }
            case "release" -> {
                semaphore.release(args.none() ? 1 : (int) args.number(0));
                return true;
            }
            case "availablePermits" -> {
                return semaphore.availablePermits();
            }
            case "drainPermits" -> {
                return semaphore.drainPermits();
            }
            case "delete" -> {
                return semaphore.delete();
            }
            default -> throw unknown(method);
        }
    }

    /**
     * {@code acquire [lease]} and {@code tryAcquire wait lease} answer the permit's id, which the others take;
     * {@code tryAcquireMany permits wait lease} and {@code releaseMany} those of several, separated by commas.
     */
    private static Object permits(RPermitExpirableSemaphore semaphore, String method, Arguments args)
            throws InterruptedException {
        switch (method) {
            case "trySetPermits" -> {
                return semaphore.trySetPermits((int) args.number(0));
            }
            case "setPermits" -> {
                semaphore.setPermits((int) args.number(0));
                return true;
            }
            case "addPermits" -> {
                semaphore.addPermits((int) args.number(0));
                return true;
            }
            case "acquire" -> {
                return args.none() ? semaphore.acquire() : semaphore.acquire(args.number(0), MILLISECONDS);
            }
            case "tryAcquire" -> {
                return orFalse(semaphore.tryAcquire(args.number(0), args.number(1), MILLISECONDS));
            }
            case "tryAcquireMany" -> {
                List<String> ids = semaphore.tryAcquire(
                        (int) args.number(0), args.number(1), args.number(2), MILLISECONDS);
                return ids.isEmpty() ? false : String.join(",", ids);
            }
            case "releaseMany" -> {
                semaphore.release(List.of(args.text(0).split(",")));
                return true;
            }
            case "delete" -> {
                return semaphore.delete();
            }
            case "release" -> {
                semaphore.release(args.text(0));
                return true;
            }
            case "tryRelease" -> {
                return semaphore.tryRelease(args.text(0));
            }
            case "updateLeaseTime" -> {
                return semaphore.updateLeaseTime(args.text(0), args.number(1), MILLISECONDS);
            }
            case "getLeaseTime" -> {
                return semaphore.getLeaseTime(args.text(0));
            }
            case "availablePermits" -> {
                return semaphore.availablePermits();
            }
            case "acquiredPermits" -> {
                return semaphore.acquiredPermits();
            }
            case "getPermits" -> {
                return semaphore.getPermits();
            }
            default -> throw unknown(method);
        }
    }

    /** {@code await [wait]}: without a wait it waits for ever. */
    private static Object latch(RCountDownLatch latch, String method, Arguments args) throws InterruptedException {
        switch (method) {
            case "trySetCount" -> {
                return latch.trySetCount(args.number(0));
            }
            case "countDown" -> {
                latch.countDown();
                return true;
            }
            case "await" -> {
                if (args.none()) {
                    latch.await();
                    return true;
                }
                return latch.await(args.number(0), MILLISECONDS);
            }
            case "getCount" -> {
                return latch.getCount();
            }
            case "delete" -> {
                return latch.delete();
            }
            default -> throw unknown(method);
        }
    }

    /**
     * Adds one to {@code key} {@code times} times, reading and writing in two steps with a little time between them:
     * only a lock that excludes keeps the sum right. Answers how many rounds ended with an exception.
     */
    private long counter(String kind, String name, long times, String key, long thinkMicros)
            throws InterruptedException {
        RBucket<Long> sum = redisson.getBucket(key, LongCodec.INSTANCE);
        long failures = 0;
        for (long i = 0; i < times; i++) {
            try {
                Runnable leave = enter(kind, name);
                try {
                    Long before = sum.get();
                    LockSupport.parkNanos(thinkMicros * 1_000);
                    sum.set(before == null ? 1 : before + 1);
                } finally {
                    leave.run();
                }
            } catch (RuntimeException e) {
                failures++;
                System.err.println("counter, round " + i + ": " + e);
            }
        }
        return failures;
    }

    /** Takes what the kind has, one of it, and answers how to give it back. */
    private Runnable enter(String kind, String name) throws InterruptedException {
        switch (kind) {
            case "semaphore" -> {
                RSemaphore semaphore = redisson.getSemaphore(name);
                semaphore.acquire();
                return semaphore::release;
            }
            case "permits" -> {
                RPermitExpirableSemaphore semaphore = redisson.getPermitExpirableSemaphore(name);
                String permit = semaphore.acquire();
                return () -> semaphore.release(permit);
            }
            default -> {
                RLock lock = lockOf(kind, name);
                lock.lock();
                return lock::unlock;
            }
        }
    }

    private static Object orFalse(Object value) {
        return value == null ? false : value;
    }

    private static IllegalArgumentException unknown(String method) {
        return new IllegalArgumentException("no method " + method + " for this kind");
    }

    private record Arguments(List<String> words) {

        boolean none() {
            return words.isEmpty();
        }

        String text(int index) {
            return words.get(index);
        }

        long number(int index) {
            return Long.parseLong(words.get(index));
        }
    }
}
