//! A real MariaDB as a child process, and a network before it that loses exactly one reply.
//!
//! [`Mysql`] is a server with an empty database, and [`MysqlProxy`] stands between it and its clients.

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{env, fmt};

use anyhow::{Context, bail};
use dlock_mysql::{MysqlLocks, MysqlLocksBuilder, OptsBuilder};
use mysql_async::Conn;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tempfile::TempDir;

use crate::child;
use crate::faketime::{self, Clock};
use crate::faults::PATIENCE;
use crate::network::{Gateway, Stream};
use crate::port::Port;
use crate::postgres::{give_away, is_root};

mod wire;

/// A proxy before a server.
pub type MysqlProxy = Gateway<Stream<wire::Mysql>>;

/// Where the program is, if not on the `PATH`.
const VARIABLE: &str = "DLOCK_MARIADBD";
/// Where Debian puts it, which is not on the `PATH` of every user.
const INSTALLED: &str = "/usr/sbin/mariadbd";
/// The scripts that make the tables of the server itself, in their order.
const SYSTEM: [&str; 3] = [
    "mysql_system_tables.sql",
    "mysql_performance_tables.sql",
    "mysql_system_tables_data.sql",
];
/// Small, and quick where the disk is: what is told committed survives a kill, which is all that tests do to it.
const SETTINGS: [&str; 9] = [
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-flush-log-at-trx-commit=2",
    "--innodb-use-native-aio=0",
    "--performance-schema=OFF",
    "--skip-name-resolve",
    "--skip-log-bin",
    "--max-connections=300",
    "--bind-address=127.0.0.1",
];

/// A running MariaDB server of its own, on a free port of 127.0.0.1, with its data in memory where that can be. It is
/// killed when this is dropped, and when the test process ends in any other way.
///
/// What was committed survives [`kill`](Self::kill).
pub struct Mysql {
    program: PathBuf,
    port: Port,
    password: String,
    /// What moves its clock.
    clock: Option<PathBuf>,
    /// Options beside those that all have.
    options: Vec<String>,
    child: Mutex<Option<Child>>,
    // after the child, which writes into it
    dir: TempDir,
}

impl Mysql {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn start() -> Mysql {
        Mysql::start_with(&[], None).await
    }

    /// The same with further options, and by this clock instead of the machine's.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn start_with(options: &[&str], clock: Option<&Clock>) -> Mysql {
        let created = tokio::task::spawn_blocking(Mysql::create).await;
        let mut server = created
            .expect("creating a server does not panic")
            .unwrap_or_else(|error| panic!("no MariaDB to test against: {error:#}"));
        server.clock = clock.map(Clock::file);
        server.options = options.iter().map(|option| (*option).to_owned()).collect();
        server.restart().await;
        server
    }

    /// A server that all tests of this process share which hold it at the same time: for those that break nothing,
    /// each in a table of its own.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn shared() -> Arc<Mysql> {
        static SHARED: tokio::sync::Mutex<Weak<Mysql>> = tokio::sync::Mutex::const_new(Weak::new());
        let mut shared = SHARED.lock().await;
        if let Some(server) = shared.upgrade() {
            return server;
        }
        let server = Arc::new(Mysql::start().await);
        *shared = Arc::downgrade(&server);
        server
    }

    fn create() -> anyhow::Result<Mysql> {
        let program = program(env::var_os(VARIABLE), &env::var_os("PATH").unwrap_or_default())?;
        let memory = Path::new("/dev/shm");
        let mut builder = tempfile::Builder::new();
        builder.prefix("dlock-my-");
        let dir = match memory.is_dir() {
            true => builder.tempdir_in(memory).or_else(|_| builder.tempdir())?,
            false => builder.tempdir()?,
        };
        let server = Mysql {
            program,
            port: Port::reserve(),
            password: format!("{:032x}", fastrand::u128(..)),
            clock: None,
            options: Vec::new(),
            child: Mutex::new(None),
            dir,
        };
        fs::set_permissions(server.dir.path(), fs::Permissions::from_mode(0o755))?;
        for dir in [server.data_dir(), server.dir.path().join("tmp")] {
            fs::create_dir(&dir)?;
            give_away(&dir)?;
        }
        server.initialize()?;
        let users = format!(
            "CREATE DATABASE IF NOT EXISTS dlock;\nCREATE OR REPLACE USER dlock@'127.0.0.1' IDENTIFIED BY '{}';\n\
             GRANT ALL ON *.* TO dlock@'127.0.0.1' WITH GRANT OPTION;\n",
            server.password
        );
        fs::write(server.dir.path().join("users.sql"), users)?;
        Ok(server)
    }

    /// Makes the tables of the server itself: what `mariadb-install-db` does, which needs programs of other packages.
    fn initialize(&self) -> anyhow::Result<()> {
        let shared = self
            .program
            .ancestors()
            .map(|dir| dir.join("share/mysql"))
            .find(|dir| dir.join(SYSTEM[0]).is_file())
            .context("the scripts of MariaDB are not in share/mysql beside its program")?;
        let mut script = "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket=NULL;\n".to_owned();
        for name in SYSTEM {
            script.push_str(&fs::read_to_string(shared.join(name))?);
        }
        let file = self.dir.path().join("system.sql");
        fs::write(&file, script)?;
        let mut bootstrap = self.command();
        bootstrap.arg("--bootstrap").stdin(File::open(&file)?);
        let output = bootstrap.output()?;
        if !output.status.success() {
            bail!(
                "mariadbd --bootstrap failed: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    /// A command for the server, which refuses to run as root.
    fn command(&self) -> Command {
        let mut command = child::command("setpriv");
        if is_root() {
            command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups"]);
        }
        // Once more: changing the user takes the death signal back.
        command.args(["--pdeathsig", "KILL", "--"]);
        if let Some(clock) = &self.clock {
            // Only here: what libfaketime makes as root is of no use to another user.
            faketime::preload_by_env(&mut command, clock).expect("the clock was made");
        }
        command.arg(&self.program).arg("--no-defaults");
        command.arg(format!("--datadir={}", self.data_dir().display()));
        // Servers that share one take each other's files.
        command.arg(format!("--tmpdir={}", self.dir.path().join("tmp").display()));
        command.args(SETTINGS);
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
    pub fn opts(&self) -> OptsBuilder {
        self.opts_at(self.addr())
    }

    /// How to reach it through another address, a proxy's.
    pub fn opts_at(&self, addr: SocketAddr) -> OptsBuilder {
        OptsBuilder::default()
            .ip_or_hostname(addr.ip().to_string())
            .tcp_port(addr.port())
            .user(Some("dlock"))
            .pass(Some(&self.password))
            .db_name(Some("dlock"))
            .prefer_socket(false)
    }

    /// The same as a URL.
    pub fn url_at(&self, addr: SocketAddr) -> String {
        format!("mysql://dlock:{}@{addr}/dlock", self.password)
    }

    /// A new connection with all rights.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn client(&self) -> Conn {
        Conn::new(self.opts()).await.expect("the server answers")
    }

    /// Locks in this table, whose steps are never late.
    pub fn locks(&self, table: &str) -> MysqlLocksBuilder {
        MysqlLocks::builder(self.opts()).table(table).timeout(PATIENCE)
    }

    /// A new table, for locks.
    ///
    /// # Panics
    /// When it cannot be made.
    pub async fn table(&self) -> String {
        let table = format!("locks_{:016x}", fastrand::u64(..));
        let store = self.locks(&table).connect().await.expect("the server is there");
        store.create_table().await.expect("the table can be made");
        table
    }

    /// Its process id while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::id)
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            let pid = Pid::from_raw(pid.try_into().expect("process ids are small"));
            let _ = signal::kill(pid, signal);
        }
    }

    /// Freezes it (`SIGSTOP`): it keeps its connections and answers nothing.
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets it go on after [`stop`](Self::stop).
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills it (`SIGKILL`), frozen or not. Does nothing when it does not run.
    pub fn kill(&self) {
        self.signal(Signal::SIGKILL);
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.wait();
        }
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
        let mut command = self.command();
        let inside = |name: &str| self.dir.path().join(name).display().to_string();
        command.arg(format!("--port={}", self.port()));
        // In the data, where it may write.
        command.arg(format!("--socket={}", inside("data/socket")));
        command.arg(format!("--pid-file={}", inside("data/pid")));
        command.arg(format!("--init-file={}", inside("users.sql")));
        command.args(&self.options).stdin(Stdio::null());
        command
            .stdout(log.try_clone().expect("a file can be shared"))
            .stderr(log);
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        self.child.lock().replace(child);
        let deadline = Instant::now() + PATIENCE;
        loop {
            // No other server has this password.
            let trouble = match Conn::new(self.opts()).await {
                Ok(conn) => {
                    let _ = conn.disconnect().await;
                    return;
                }
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

impl fmt::Debug for Mysql {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mysql")
            .field("port", &self.port())
            .field("pid", &self.pid())
            .finish_non_exhaustive()
    }
}

impl Drop for Mysql {
    fn drop(&mut self) {
        self.kill();
    }
}

fn program(named: Option<OsString>, on_path: &std::ffi::OsStr) -> anyhow::Result<PathBuf> {
    if let Some(program) = named.filter(|program| !program.is_empty()).map(PathBuf::from) {
        if !program.is_file() {
            bail!("{VARIABLE} names {}, which is no program", program.display());
        }
        return Ok(program);
    }
    let on_path = env::split_paths(on_path).map(|dir| dir.join("mariadbd"));
    let mut programs = on_path.chain([PathBuf::from(INSTALLED)]);
    programs.find(|path| path.is_file()).with_context(|| {
        format!("no mariadbd: set {VARIABLE} to its path, or run scripts/servers.sh, which installs it")
    })
}
