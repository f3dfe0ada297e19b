//! A real PostgreSQL as child processes, and a network before it that loses exactly one reply.
//!
//! [`Postgres`] is a server with nothing in it, and [`PgProxy`] stands between it and its clients.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{env, fmt};

use anyhow::{Context, bail};
use dlock::record::Records;
use dlock_postgres::PostgresRecords;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio_postgres::{Client, Config, NoTls};

use crate::child;
use crate::faketime::{self, Clock};
use crate::network::{Gateway, Stream};
use crate::port::Port;

mod pooler;
mod wire;

pub use pooler::Pooler;

/// A proxy before a server.
pub type PgProxy = Gateway<Stream<wire::Pg>>;

/// How long a server may take to start, to stop, or to answer the harness.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the programs are, if not on the `PATH`.
const VARIABLE: &str = "DLOCK_POSTGRES_BIN";
/// Where Debian puts them, one directory for each version.
const INSTALLED: &str = "/usr/lib/postgresql";
/// As whom the server runs where the tests run as root.
const OWNER: &str = "nobody:nogroup";

/// A running PostgreSQL server of its own, on a free port of 127.0.0.1, with its data in memory where that can be. It
/// is killed when this is dropped, and when the test process ends in any other way.
///
/// What was committed survives [`kill`](Self::kill).
pub struct Postgres {
    programs: PathBuf,
    port: Port,
    password: String,
    /// What moves its clock.
    clock: Option<PathBuf>,
    child: Mutex<Option<Child>>,
    // after the child, which writes into it
    dir: TempDir,
}

impl Postgres {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn start() -> Postgres {
        Postgres::start_by(None).await
    }

    /// The same by this clock, and not by the machine's.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn start_by(clock: Option<&Clock>) -> Postgres {
        let created = tokio::task::spawn_blocking(Postgres::create).await;
        let mut server = created
            .expect("creating a server does not panic")
            .unwrap_or_else(|error| panic!("no PostgreSQL to test against: {error:#}"));
        server.clock = clock.map(Clock::file);
        server.restart().await;
        server
    }

    /// A server that all tests of this process share which hold it at the same time: for those that break nothing,
    /// each in a table of its own.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn shared() -> Arc<Postgres> {
        static SHARED: tokio::sync::Mutex<Weak<Postgres>> = tokio::sync::Mutex::const_new(Weak::new());
        let mut shared = SHARED.lock().await;
        if let Some(server) = shared.upgrade() {
            return server;
        }
        let server = Arc::new(Postgres::start().await);
        *shared = Arc::downgrade(&server);
        server
    }

    fn create() -> anyhow::Result<Postgres> {
        let programs = programs(env::var_os(VARIABLE), &env::var_os("PATH").unwrap_or_default())?;
        let server = Postgres::empty(programs, format!("{:032x}", fastrand::u128(..)))?;
        server.initialize()?;
        Ok(server)
    }

    /// A server that has no data yet.
    fn empty(programs: PathBuf, password: String) -> anyhow::Result<Postgres> {
        let memory = Path::new("/dev/shm");
        let mut builder = tempfile::Builder::new();
        builder.prefix("dlock-pg-");
        let dir = match memory.is_dir() {
            true => builder.tempdir_in(memory).or_else(|_| builder.tempdir())?,
            false => builder.tempdir()?,
        };
        let server = Postgres {
            programs,
            port: Port::reserve(),
            password,
            clock: None,
            child: Mutex::new(None),
            dir,
        };
        let data = server.data_dir();
        fs::set_permissions(server.dir.path(), fs::Permissions::from_mode(0o755))?;
        fs::create_dir(&data)?;
        fs::set_permissions(&data, fs::Permissions::from_mode(0o700))?;
        give_away(&data)?;
        Ok(server)
    }

    /// Restarts a running server together with a standby of it, and waits until both answer. The standby has the same
    /// password.
    ///
    /// # Panics
    /// When one does not.
    pub async fn standby_of(primary: &Postgres) -> Postgres {
        primary.shutdown();
        let server = Postgres::empty(primary.programs.clone(), primary.password.clone())
            .and_then(|server| server.copy_from(primary).map(|()| server))
            .unwrap_or_else(|error| panic!("no standby to test against: {error:#}"));
        primary.restart().await;
        server.restart().await;
        server
    }

    /// Makes a primary of a standby, and waits until it is one.
    ///
    /// # Panics
    /// When it does not become one.
    pub async fn promote(&self) {
        let promoted = self.client().await.query_one("SELECT pg_promote()", &[]).await;
        assert!(
            promoted.expect("it can be asked").get::<_, bool>(0),
            "it is promoted"
        );
    }

    /// Ends a primary and starts it again as a standby, that only reads and follows no primary.
    ///
    /// # Panics
    /// When that fails.
    pub async fn demote(&self) {
        self.shutdown();
        fs::write(self.data_dir().join("standby.signal"), "").expect("the data can be written to");
        self.restart().await;
    }

    fn initialize(&self) -> anyhow::Result<()> {
        let (data, secret) = (self.data_dir(), self.dir.path().join("password"));
        fs::write(&secret, &self.password)?;
        give_away(&secret)?;
        let mut initdb = self.command("initdb");
        initdb.arg("--pgdata").arg(&data).arg("--pwfile").arg(&secret);
        // Scram takes long without optimization, and is not what these tests are about.
        initdb.args(["--username=dlock", "--auth=md5", "--encoding=UTF8"]);
        initdb.args(["--locale=C", "--no-sync", "--no-instructions"]);
        let output = initdb.stdin(Stdio::null()).output()?;
        if !output.status.success() {
            bail!("initdb failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let settings = format!(
            "listen_addresses = '127.0.0.1'\nport = {}\nunix_socket_directories = ''\nfsync = off\n\
             full_page_writes = off\ndynamic_shared_memory_type = mmap\nshared_buffers = 32MB\nmax_connections = 200\nrestart_after_crash = on\n",
            self.port()
        );
        let config = data.join("postgresql.auto.conf");
        fs::write(&config, settings)?;
        Ok(())
    }

    /// Takes over the data of a server that does not run, as a standby that will follow it.
    fn copy_from(&self, primary: &Postgres) -> anyhow::Result<()> {
        let (from, to) = (primary.data_dir(), self.data_dir());
        let copied = Command::new("cp")
            .arg("-a")
            .arg(from.join("."))
            .arg(&to)
            .status()?;
        if !copied.success() {
            bail!("the data of the primary could not be copied");
        }
        fs::write(to.join("standby.signal"), "")?;
        let mut config = File::options()
            .append(true)
            .open(to.join("postgresql.auto.conf"))?;
        // The last one counts.
        writeln!(
            config,
            "port = {}\nprimary_conninfo = 'host=127.0.0.1 port={} user=dlock password={}'",
            self.port(),
            primary.port(),
            self.password
        )?;
        Ok(())
    }

    /// A command for one of the server's programs, which refuse to run as root.
    fn command(&self, program: &str) -> Command {
        let mut command = child::command("setpriv");
        if is_root() {
            command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups"]);
        }
        // Once more: changing the user takes the death signal back.
        command.args(["--pdeathsig", "KILL", "--"]);
        if let Some(clock) = self.clock.as_ref().filter(|_| program == "postgres") {
            // Only here: what libfaketime makes as root is of no use to another user.
            faketime::preload_by_env(&mut command, clock).expect("the clock was made");
        }
        command.arg(self.programs.join(program));
        command.current_dir(self.dir.path());
        command
    }

    fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port()).into()
    }

    /// How to reach it, with all rights.
    pub fn config(&self) -> Config {
        self.config_at(self.addr())
    }

    /// How to reach this server or another one with the same password, in this order.
    pub fn config_with(&self, other: SocketAddr) -> Config {
        let mut config = self.config();
        config.host(other.ip().to_string()).port(other.port());
        config
    }

    /// How to reach it through another address, a [`PgProxy`]'s.
    pub fn config_at(&self, addr: SocketAddr) -> Config {
        let mut config = Config::new();
        config.host(addr.ip().to_string()).port(addr.port());
        config.user("dlock").dbname("postgres").password(&self.password);
        config
    }

    /// The same as text, for another process.
    pub fn url_at(&self, addr: SocketAddr) -> String {
        format!("postgres://dlock:{}@{addr}/postgres", self.password)
    }

    /// A new connection with all rights.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn client(&self) -> Client {
        self.client_at(self.addr()).await
    }

    /// The same through another address.
    ///
    /// # Panics
    /// When no server answers.
    pub async fn client_at(&self, addr: SocketAddr) -> Client {
        connect(&self.config_at(addr)).await.expect("the server answers")
    }

    /// Records in a table that is made if it is not there.
    ///
    /// # Panics
    /// When that fails.
    pub async fn records(&self, table: &str) -> (PostgresRecords, Records) {
        let builder = PostgresRecords::builder(self.config(), NoTls).table(table);
        // A machine that stands still for a while is no trouble that the tests with these are about.
        let store = builder
            .timeout(PATIENCE)
            .connect()
            .await
            .expect("the server is there");
        store.create_table().await.expect("the table can be made");
        (store.clone(), Records::new(store))
    }

    /// Its process id while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::id)
    }

    /// The server and all the processes that it works with.
    fn processes(&self) -> Vec<Pid> {
        let Some(pid) = self.pid() else { return Vec::new() };
        let children = children_of(pid);
        let all = [pid].into_iter().chain(children);
        all.map(|pid| Pid::from_raw(pid.try_into().expect("process ids are small")))
            .collect()
    }

    fn signal_all(&self, signal: Signal) {
        for process in self.processes() {
            // some may have ended
            let _ = signal::kill(process, signal);
        }
    }

    /// Freezes it (`SIGSTOP`), every process of it. The kernel goes on to accept connections and bytes for it.
    ///
    /// # Panics
    /// When it does not run.
    pub fn stop(&self) {
        assert!(self.pid().is_some(), "the server runs");
        let deadline = Instant::now() + PATIENCE;
        // Only the first of them could start more.
        loop {
            self.signal_all(Signal::SIGSTOP);
            let still = |pid: &Pid| state_of(pid.as_raw()).is_none_or(|state| matches!(state, 'T' | 'Z'));
            if self.processes().iter().all(still) {
                return;
            }
            assert!(Instant::now() < deadline, "the server does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets a frozen server go on (`SIGCONT`).
    pub fn cont(&self) {
        self.signal_all(Signal::SIGCONT);
    }

    /// Kills it (`SIGKILL`) with all its processes, frozen or not. Does nothing when it does not run.
    pub fn kill(&self) {
        let processes = self.processes();
        self.signal_all(Signal::SIGKILL);
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.wait();
        }
        let deadline = Instant::now() + PATIENCE;
        // The next start waits for none of them, and fails.
        while processes
            .iter()
            .any(|pid| state_of(pid.as_raw()).is_some_and(|state| state != 'Z'))
        {
            assert!(Instant::now() < deadline, "the server does not die");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Asks it to end and to drop its clients (`SIGINT`, a fast shutdown), and waits until it has.
    ///
    /// # Panics
    /// When it does not in time.
    pub fn shutdown(&self) {
        assert!(
            self.end_by(Signal::SIGINT),
            "the server does not end: {}",
            self.log()
        );
    }

    fn end_by(&self, signal: Signal) -> bool {
        let mut guard = self.child.lock();
        let Some(child) = guard.as_mut() else { return true };
        let pid = Pid::from_raw(child.id().try_into().expect("process ids are small"));
        let _ = signal::kill(pid, signal);
        let deadline = Instant::now() + PATIENCE;
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        guard.take();
        true
    }

    /// Starts it again on the same port with its data, killing it first if it runs.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        self.kill();
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_file())
            .expect("a log can be written");
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data_dir()).stdin(Stdio::null());
        command
            .stdout(log.try_clone().expect("a file can be shared"))
            .stderr(log);
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        self.child.lock().replace(child);
        let deadline = Instant::now() + PATIENCE;
        loop {
            // No other server has this password.
            let trouble = match connect(&self.config()).await {
                Ok(_) => return,
                Err(error) => error,
            };
            let ended = matches!(self.child.lock().as_mut().map(Child::try_wait), Some(Ok(Some(_))));
            assert!(
                !ended && Instant::now() < deadline,
                "the server does not answer ({trouble}); it said:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn log_file(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }

    /// All that it printed so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_file()).unwrap_or_default()).into_owned()
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres")
            .field("port", &self.port())
            .field("pid", &self.pid())
            .finish_non_exhaustive()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // An immediate shutdown gives the kernel its shared memory back, which a kill does not.
        self.cont();
        if !self.end_by(Signal::SIGQUIT) {
            self.kill();
        }
    }
}

/// A table name that is unused.
pub fn fresh_table() -> String {
    format!("records_{:016x}", fastrand::u64(..))
}

/// A connection of the `tokio-postgres` crate, driven by the runtime that this is called in.
///
/// # Errors
/// When no server answers, or refuses.
pub async fn connect(config: &Config) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(client)
}

/// Makes the user to whom the server belongs the owner of a path.
pub(crate) fn give_away(path: &Path) -> anyhow::Result<()> {
    if is_root() && !Command::new("chown").arg(OWNER).arg(path).status()?.success() {
        bail!("chown to {OWNER} failed");
    }
    Ok(())
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn programs(named: Option<OsString>, on_path: &std::ffi::OsStr) -> anyhow::Result<PathBuf> {
    let complete = |dir: &PathBuf| ["initdb", "postgres"].iter().all(|name| dir.join(name).is_file());
    if let Some(dir) = named.filter(|dir| !dir.is_empty()).map(PathBuf::from) {
        if !complete(&dir) {
            bail!(
                "{VARIABLE} names {}, which has no initdb and postgres",
                dir.display()
            );
        }
        return Ok(dir);
    }
    let mut installed: Vec<PathBuf> = fs::read_dir(INSTALLED)
        .into_iter()
        .flatten()
        .filter_map(|version| Some(version.ok()?.path().join("bin")))
        .collect();
    installed.sort();
    let mut dirs = env::split_paths(on_path).chain(installed.into_iter().rev());
    dirs.find(complete).with_context(|| {
        format!(
            "no initdb and postgres: set {VARIABLE} to the directory that has them, or run scripts/servers.sh, \
             which installs them"
        )
    })
}

/// What `/proc` says of a process after its name: its state, its parent, …
fn stat_of(pid: i32) -> Option<Vec<String>> {
    // the name stands in parentheses and may hold anything
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

fn state_of(pid: i32) -> Option<char> {
    stat_of(pid)?.first()?.chars().next()
}

fn children_of(parent: u32) -> Vec<u32> {
    let parent = parent.to_string();
    let all = fs::read_dir("/proc").into_iter().flatten();
    all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| stat_of(*pid).is_some_and(|stat| stat.get(1) == Some(&parent)))
        .filter_map(|pid| u32::try_from(pid).ok())
        .collect()
}
