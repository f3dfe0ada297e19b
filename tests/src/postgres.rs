//! A real PostgreSQL as child processes, and a network before it that loses exactly one reply.
//!
//! [`Postgres`] is a server with nothing in it, and [`PgProxy`] stands between it and its clients.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use dlock::record::Records;
use dlock_postgres::PostgresRecords;
use nix::sys::signal::Signal;
use tokio_postgres::{Client, Config, NoTls};

use crate::certificates::Certificates;
use crate::faketime::{self, Clock};
use crate::network::{Gateway, Stream};
use crate::process::{PATIENCE, Process, SharedServer, give_away, unprivileged};

mod pooler;
mod wire;

pub use pooler::Pooler;

/// What a server and its clients speak.
pub type PgWire = Stream<wire::Pg>;
/// A proxy before a server.
pub type PgProxy = Gateway<PgWire>;

/// Where the programs are, if not on the `PATH`.
const VARIABLE: &str = "DLOCK_POSTGRES_BIN";
/// Where Debian puts them, one directory for each version.
const INSTALLED: &str = "/usr/lib/postgresql";
/// A running PostgreSQL server of its own. What was committed survives [`kill`](Process::kill).
#[derive(Debug)]
pub struct Postgres {
    programs: PathBuf,
    process: Process,
    password: String,
    /// What moves its clock.
    clock: Option<PathBuf>,
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
        Postgres::begin(Postgres::process(), clock).await
    }

    /// The same on a disk of this many bytes.
    ///
    /// # Panics
    /// When it does not answer, or a disk cannot be made.
    pub async fn start_on_a_disk(bytes: u64) -> Postgres {
        Postgres::begin(Postgres::process().on_a_disk(bytes), None).await
    }

    fn process() -> Process {
        Process::new("dlock-pg-")
    }

    async fn begin(process: Process, clock: Option<&Clock>) -> Postgres {
        let created = tokio::task::spawn_blocking(|| Postgres::create(process)).await;
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
        static SHARED: SharedServer<Postgres> = SharedServer::new();
        SHARED.or(Postgres::start()).await
    }

    fn create(process: Process) -> anyhow::Result<Postgres> {
        let programs = programs(env::var_os(VARIABLE), &env::var_os("PATH").unwrap_or_default())?;
        let server = Postgres::empty(programs, process, format!("{:032x}", fastrand::u128(..)))?;
        server.initialize()?;
        Ok(server)
    }

    /// A server that has no data yet.
    fn empty(programs: PathBuf, process: Process, password: String) -> anyhow::Result<Postgres> {
        let server = Postgres {
            programs,
            process,
            password,
            clock: None,
        };
        let data = server.data_dir();
        fs::create_dir(&data)?;
        fs::set_permissions(&data, fs::Permissions::from_mode(0o700))?;
        give_away(&data);
        Ok(server)
    }

    /// Restarts a running server together with a standby of it, and waits until both answer. The standby has the same
    /// password.
    ///
    /// # Panics
    /// When one does not.
    pub async fn standby_of(primary: &Postgres) -> Postgres {
        primary.shutdown();
        let server = Postgres::empty(
            primary.programs.clone(),
            Postgres::process(),
            primary.password.clone(),
        )
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

    /// Whether transactions only read, by default.
    ///
    /// # Panics
    /// When that cannot be set.
    pub async fn only_reads(&self, reads: bool) {
        let client = self.client().await;
        // A server that has been switched off for writing is switched on again.
        let set = format!("ALTER SYSTEM SET default_transaction_read_only = {reads}");
        for sql in [
            "SET default_transaction_read_only = off",
            &set,
            "SELECT pg_reload_conf()",
        ] {
            client.batch_execute(sql).await.expect("it can be set");
        }
    }

    /// From now on it only accepts encrypted connections, so that it cannot be asked by [`client`](Self::client) any more.
    ///
    /// # Panics
    /// When that cannot be set.
    pub async fn encrypt(&self, certificates: &Certificates) {
        let client = self.client().await;
        let only = "hostssl all all 127.0.0.1/32 md5\n";
        fs::write(self.data_dir().join("pg_hba.conf"), only).expect("the data can be written to");
        for (setting, file) in [("ssl_cert_file", "server.pem"), ("ssl_key_file", "server.key")] {
            let set = format!(
                "ALTER SYSTEM SET {setting} = '{}'",
                certificates.file(file).display()
            );
            client.batch_execute(&set).await.expect("it can be set");
        }
        for sql in ["ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()"] {
            client.batch_execute(sql).await.expect("it can be set");
        }
        while connect(&self.config()).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn initialize(&self) -> anyhow::Result<()> {
        let (data, secret) = (self.data_dir(), self.dir().join("password"));
        fs::write(&secret, &self.password)?;
        give_away(&secret);
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
        let mut command = unprivileged();
        if let Some(clock) = self.clock.as_ref().filter(|_| program == "postgres") {
            // Only here: what libfaketime makes as root is of no use to another user.
            faketime::preload_by_env(&mut command, clock).expect("the clock was made");
        }
        command.arg(self.programs.join(program));
        command.current_dir(self.dir());
        command
    }

    fn data_dir(&self) -> PathBuf {
        self.data().join("data")
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

    /// Asks it to end and to drop its clients (`SIGINT`, a fast shutdown), and waits until it has.
    ///
    /// # Panics
    /// When it does not in time.
    pub fn shutdown(&self) {
        assert!(
            self.ends_by(Signal::SIGINT),
            "the server does not end: {}",
            self.log()
        );
    }

    /// Starts it again on the same port with its data, killing it first if it runs.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data_dir());
        self.launch(command);
        let launched = Instant::now();
        // No other server has this password.
        while let Err(error) = connect(&self.config()).await {
            self.is_starting(launched, error).await;
        }
    }
}

impl Deref for Postgres {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // An immediate shutdown gives the kernel its shared memory back, which a kill does not.
        self.cont();
        self.ends_by(Signal::SIGQUIT);
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
