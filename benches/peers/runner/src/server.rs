//! The server of a measurement: its own, on a free port, without persistence.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

const START_WITHIN: Duration = Duration::from_secs(20);

/// Commands that only clients send; scripts cannot, or have no reason to.
const SENT_BY_CLIENTS: &[&str] = &[
    "eval",
    "evalsha",
    "fcall",
    "script",
    "ping",
    "subscribe",
    "unsubscribe",
    "client",
];

/// A running server, which ends with this.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    port: u16,
}

/// What a server has used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServerUsage {
    /// Kernel included.
    pub(crate) cpu_s: f64,
    /// In scripts, by its own count.
    pub(crate) script_s: f64,
}

impl Server {
    /// Starts one and waits until it answers.
    pub(crate) fn start(program: &Path) -> anyhow::Result<Server> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("{} cannot be started", program.display()))?;
        let mut server = Server { child, port };
        let begin = Instant::now();
        while server.ask("PING").is_err() {
            if let Some(status) = server.child.try_wait()? {
                bail!("{} ended with {status}", program.display());
            }
            if begin.elapsed() > START_WITHIN {
                bail!("{} does not answer", program.display());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(server)
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// As in `Redis 7.0.15`.
    pub(crate) fn version(&self) -> anyhow::Result<String> {
        let info = self.ask("INFO server")?;
        let value = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        };
        match (value("valkey_version"), value("redis_version")) {
            (Some(valkey), _) => Ok(format!("Valkey {valkey}")),
            (None, Some(redis)) => Ok(format!("Redis {redis}")),
            (None, None) => bail!("the server does not say its version"),
        }
    }

    /// Commands that clients have sent, a script counting as one.
    pub(crate) fn commands(&self) -> anyhow::Result<u64> {
        let info = self.ask("INFO commandstats")?;
        let calls = info.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let command = name.split('|').next()?;
            SENT_BY_CLIENTS.contains(&command).then_some(())?;
            rest.split(',').next()?.parse::<u64>().ok()
        });
        Ok(calls.sum())
    }

    /// What it has used since it was started.
    pub(crate) fn usage(&self) -> anyhow::Result<ServerUsage> {
        let info = self.ask("INFO cpu")? + &self.ask("INFO commandstats")?;
        let value = |name: &str| {
            info.lines()
                .find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
        };
        let cpu = |name| value(name)?.parse::<f64>().ok();
        let cpu_s = cpu("used_cpu_user").zip(cpu("used_cpu_sys"));
        let (user, sys) = cpu_s.context("the server does not say what it has used")?;
        let micros = |name: &&str| {
            let usec = value(name)?
                .split(',')
                .find_map(|part| part.strip_prefix("usec="))?;
            usec.parse::<f64>().ok()
        };
        let scripts = ["cmdstat_eval", "cmdstat_evalsha"];
        Ok(ServerUsage {
            cpu_s: user + sys,
            script_s: scripts.iter().filter_map(micros).sum::<f64>() / 1e6,
        })
    }

    /// Forgets all keys.
    pub(crate) fn flush(&self) -> anyhow::Result<()> {
        self.ask("FLUSHALL").map(drop)
    }

    /// One command, whose answer is a line or one text.
    fn ask(&self, command: &str) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(START_WITHIN))?;
        stream.write_all(format!("{command}\r\n").as_bytes())?;
        let mut answer = BufReader::new(stream);
        let mut line = String::new();
        answer.read_line(&mut line)?;
        if let Some(length) = line.strip_prefix('$') {
            let mut text = vec![0; length.trim().parse()?];
            answer.read_exact(&mut text)?;
            return Ok(String::from_utf8_lossy(&text).replace('\r', ""));
        }
        if !line.starts_with('+') {
            bail!("{command} was answered by {line:?}");
        }
        Ok(line)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
