//! A real MariaDB as a child process, and a network before it that loses exactly one reply.
//!
//! [`Mysql`] is a server with an empty database, and [`MysqlProxy`] stands between it and its clients.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use dlock_mysql::{MysqlLocks, MysqlLocksBuilder, OptsBuilder};
use mysql_async::Conn;

use crate::faketime::{self, Clock};
use crate::faults::PATIENCE;
use crate::network::{Gateway, Stream};
use crate::process::{Process, SharedServer, give_away};

mod wire;

/// What a server and its clients speak.
pub type MysqlWire = Stream<wire::Mysql>;
/// A proxy before a server.
pub type MysqlProxy = Gateway<MysqlWire>;

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

/// A running MariaDB server of its own. What was committed survives [`kill`](Process::kill).
#[derive(Debug)]
pub struct Mysql {
    program: PathBuf,
    process: Process,
    password: String,
    /// What moves its clock.
    clock: Option<PathBuf>,
    /// Its time zone, if not the machine's.
    zone: Option<String>,
    /// Options beside those that all have.
    options: Vec<String>,
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
        Mysql::begin(Mysql::process(), options, clock, None).await
    }

    /// The same in this time zone, as in the variable `TZ`, and by this clock.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn start_in_zone(zone: &str, options: &[&str], clock: &Clock) -> Mysql {
        Mysql::begin(Mysql::process(), options, Some(clock), Some(zone)).await
    }

    /// The same on a disk of this many bytes.
    ///
    /// # Panics
    /// When it does not answer, or a disk cannot be made.
    pub async fn start_on_a_disk(bytes: u64, options: &[&str]) -> Mysql {
        Mysql::begin(Mysql::process().on_a_disk(bytes), options, None, None).await
    }

    fn process() -> Process {
        Process::new("dlock-my-")
    }

    async fn begin(process: Process, options: &[&str], clock: Option<&Clock>, zone: Option<&str>) -> Mysql {
        let created = tokio::task::spawn_blocking(|| Mysql::create(process)).await;
        let mut server = created
            .expect("creating a server does not panic")
            .unwrap_or_else(|error| panic!("no MariaDB to test against: {error:#}"));
        server.clock = clock.map(Clock::file);
        server.zone = zone.map(str::to_owned);
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
        static SHARED: SharedServer<Mysql> = SharedServer::new();
        SHARED.or(Mysql::start()).await
    }

    fn create(process: Process) -> anyhow::Result<Mysql> {
        let program = program(env::var_os(VARIABLE), &env::var_os("PATH").unwrap_or_default())?;
        let server = Mysql {
            program,
            process,
            password: format!("{:032x}", fastrand::u128(..)),
            clock: None,
            zone: None,
            options: Vec::new(),
        };
        for dir in ["data", "tmp"].map(|name| server.data().join(name)) {
            fs::create_dir(&dir)?;
            give_away(&dir);
        }
        server.initialize()?;
        let users = format!(
            "CREATE DATABASE IF NOT EXISTS dlock;\nCREATE OR REPLACE USER dlock@'127.0.0.1' IDENTIFIED BY '{}';\n\
             GRANT ALL ON *.* TO dlock@'127.0.0.1' WITH GRANT OPTION;\n",
            server.password
        );
        fs::write(server.data().join("users.sql"), users)?;
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
        let file = self.dir().join("system.sql");
        fs::write(&file, script)?;
        let mut bootstrap = self.command();
        bootstrap
            .arg("--bootstrap")
            .stdin(File::open(&file)?)
            .current_dir(self.dir());
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
        let mut command = self.unprivileged();
        if let Some(clock) = &self.clock {
            // Only here: what libfaketime makes as root is of no use to another user.
            faketime::preload_by_env(&mut command, clock).expect("the clock was made");
        }
        if let Some(zone) = &self.zone {
            command.env("TZ", zone);
        }
        command.arg(&self.program).arg("--no-defaults");
        // For the root of a user namespace; the server ignores it as any other user.
        command.arg("--user=root");
        command.arg(format!("--datadir={}", self.named("data")));
        // Servers that share one take each other's files.
        command.arg(format!("--tmpdir={}", self.named("tmp")));
        command.args(SETTINGS);
        command
    }

    /// A path in its data as it has to be named to the server, which resolves links.
    fn named(&self, path: &str) -> String {
        self.dir().join(path).display().to_string()
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

    /// Starts it again on the same port with its data, killing it first if it runs.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        let mut command = self.command();
        command.arg(format!("--port={}", self.port()));
        // In the data, where it may write.
        command.arg(format!("--socket={}", self.named("data/socket")));
        command.arg(format!("--pid-file={}", self.named("data/pid")));
        command.arg(format!("--init-file={}", self.named("users.sql")));
        command.args(&self.options);
        self.launch(command);
        let launched = Instant::now();
        loop {
            // No other server has this password.
            match Conn::new(self.opts()).await {
                Ok(conn) => return drop(conn.disconnect().await),
                Err(error) => self.is_starting(launched, error).await,
            }
        }
    }
}

impl Deref for Mysql {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
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
