//! Splits a configuration into its hosts.

use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts, TargetSessionAttrs};

/// A server that may be the primary.
pub(crate) struct Candidate {
    pub(crate) config: Config,
    /// The address for messages, without credentials.
    pub(crate) address: String,
}

/// Returns one configuration for each host of `config`; each connects only to a server that accepts writes.
///
/// `tokio-postgres` would try the hosts itself, but without a limit for each: a host that accepts connections and sends
/// no reply would hide all hosts after it.
pub(crate) fn candidates(config: &Config, timeout: Duration) -> Vec<Candidate> {
    let (hosts, addresses, ports) = (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let count = hosts.len().max(addresses.len()).max(1);
    let mut candidates: Vec<Candidate> = (0..count)
        .map(|i| {
            let mut alone = without_hosts(config);
            let mut name = "PostgreSQL".to_owned();
            if let Some(address) = addresses.get(i) {
                alone.hostaddr(*address);
                name = address.to_string();
            }
            match hosts.get(i) {
                Some(Host::Tcp(host)) => {
                    alone.host(host);
                    name.clone_from(host);
                }
                #[cfg(unix)]
                Some(Host::Unix(path)) => {
                    alone.host_path(path);
                    name = path.display().to_string();
                }
                None => {}
            }
            let port = ports.get(i).or(ports.first()).copied().unwrap_or(5432);
            alone.port(port);
            alone.target_session_attrs(TargetSessionAttrs::ReadWrite);
            if config.get_connect_timeout().is_none() {
                // A name may resolve to several addresses.
                alone.connect_timeout(timeout / 2 / count.try_into().unwrap_or(u32::MAX));
            }
            Candidate {
                config: alone,
                address: format!("{name}:{port}"),
            }
        })
        .collect();
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        fastrand::shuffle(&mut candidates);
    }
    candidates
}

fn without_hosts(from: &Config) -> Config {
    let mut to = Config::new();
    if let Some(user) = from.get_user() {
        to.user(user);
    }
    if let Some(password) = from.get_password() {
        to.password(password);
    }
    if let Some(dbname) = from.get_dbname() {
        to.dbname(dbname);
    }
    if let Some(options) = from.get_options() {
        to.options(options);
    }
    if let Some(timeout) = from.get_connect_timeout() {
        to.connect_timeout(*timeout);
    }
    if let Some(timeout) = from.get_tcp_user_timeout() {
        to.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = from.get_keepalives_interval() {
        to.keepalives_interval(interval);
    }
    if let Some(retries) = from.get_keepalives_retries() {
        to.keepalives_retries(retries);
    }
    to.application_name(from.get_application_name().unwrap_or("dlock"))
        .ssl_mode(from.get_ssl_mode())
        .ssl_negotiation(from.get_ssl_negotiation())
        .keepalives(from.get_keepalives())
        .keepalives_idle(from.get_keepalives_idle())
        .channel_binding(from.get_channel_binding())
        .load_balance_hosts(from.get_load_balance_hosts());
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No option of a URL is lost when its hosts are separated.
    #[test]
    fn options_of_the_url_stay_with_each_host() {
        let url = "postgres://shop:secret@a:5433,b,[::1]:5434/shop?sslmode=require&connect_timeout=3&keepalives=0\
                   &keepalives_idle=7&keepalives_interval=8&keepalives_retries=9&tcp_user_timeout=4\
                   &application_name=till&options=-c%20geqo%3Doff&channel_binding=disable&sslnegotiation=direct";
        let all: Config = url.parse().unwrap();
        let alone = |host: &str| {
            let (_, query) = url.split_once('?').unwrap();
            let mut one: Config = format!("postgres://shop:secret@{host}/shop?{query}")
                .parse()
                .unwrap();
            one.target_session_attrs(TargetSessionAttrs::ReadWrite);
            one
        };
        let candidates = candidates(&all, Duration::from_secs(1));
        let configs: Vec<Config> = candidates.iter().map(|each| each.config.clone()).collect();
        assert_eq!(configs, [alone("a:5433"), alone("b:5432"), alone("[::1]:5434")]);
        let addresses: Vec<&str> = candidates.iter().map(|each| &*each.address).collect();
        assert_eq!(addresses, ["a:5433", "b:5432", "::1:5434"]);
    }
}
