package dlock.interop;

import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.List;
import org.redisson.config.Config;
import org.redisson.config.SingleServerConfig;

/** Turns the command line into a configuration of Redisson; what is not named keeps Redisson's own default. */
final class Settings {

    private Settings() {
    }

    /**
     * {@code url} is {@code redis://[user:password@]host:port[/db]} or {@code redis+cluster://[…@]h1:p1,h2:p2}.
     * Options: {@code watchdog}, {@code fair-wait} and {@code timeout} in milliseconds, {@code retries}.
     */
    static Config parse(String url, List<String> options) {
        Config config = new Config();
        config.setThreads(8);
        config.setNettyThreads(4);

        String scheme = url.substring(0, url.indexOf("://"));
        String authority = url.substring(scheme.length() + "://".length());
        String database = "";
        int slash = authority.indexOf('/');
        if (slash >= 0) {
            database = authority.substring(slash + 1);
            authority = authority.substring(0, slash);
        }
        int at = authority.lastIndexOf('@');
        if (at >= 0) {
            credentials(config, authority.substring(0, at));
            authority = authority.substring(at + 1);
        }

        // The pools grow on demand: 24 connections per process at the start would only make the tests slower.
        int timeout = number(options, "timeout", -1);
        int retries = number(options, "retries", -1);
        if (scheme.equals("redis+cluster")) {
            var cluster = config.useClusterServers();
            for (String node : authority.split(",")) {
                cluster.addNodeAddress("redis://" + node);
            }
            cluster.setMasterConnectionMinimumIdleSize(2).setSlaveConnectionMinimumIdleSize(1);
            if (timeout >= 0) {
                cluster.setTimeout(timeout);
            }
            if (retries >= 0) {
                cluster.setRetryAttempts(retries);
            }
        } else {
            SingleServerConfig single = config.useSingleServer()
                    .setAddress(scheme + "://" + authority)
                    .setConnectionMinimumIdleSize(2)
                    .setDatabase(database.isEmpty() ? 0 : Integer.parseInt(database));
            if (timeout >= 0) {
                single.setTimeout(timeout);
            }
            if (retries >= 0) {
                single.setRetryAttempts(retries);
            }
        }

        int watchdog = number(options, "watchdog", -1);
        if (watchdog >= 0) {
            config.setLockWatchdogTimeout(watchdog);
        }
        int fairWait = number(options, "fair-wait", -1);
        if (fairWait >= 0) {
            config.setFairLockWaitTimeout(fairWait);
        }
        return config;
    }

    private static void credentials(Config config, String userInfo) {
        int colon = userInfo.indexOf(':');
        String user = URLDecoder.decode(userInfo.substring(0, Math.max(colon, 0)), StandardCharsets.UTF_8);
        if (!user.isEmpty()) {
            config.setUsername(user);
        }
        config.setPassword(URLDecoder.decode(userInfo.substring(colon + 1), StandardCharsets.UTF_8));
    }

    private static int number(List<String> options, String name, int otherwise) {
        for (String option : options) {
            if (option.startsWith(name + "=")) {
                return Integer.parseInt(option.substring(name.length() + 1));
            }
        }
        return otherwise;
    }
}
