//! PgBouncer before a server.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::{env, fmt};

use tempfile::TempDir;

use super::{PATIENCE, Postgres, connect, give_away, is_root};
use crate::child;
use crate::port::Port;

/// Where the program is, if not where Debian puts it.
const VARIABLE: &str = "DLOCK_PGBOUNCER";
const INSTALLED: &str = "/usr/sbin/pgbouncer";

/// A PgBouncer of its own, with few connections to its server. It is killed when this is dropped.
pub struct Pooler {
    port: Port,
    child: Child,
    dir: TempDir,
}

impl Pooler {
    /// Starts one in this mode (`transaction`, `session`), and waits until it answers.
    ///
    /// # Panics
    /// When it does not. The message says what to do.
    pub async fn start(server: &Postgres, mode: &str) -> Pooler {
        let program = env::var_os(VARIABLE).map_or_else(|| PathBuf::from(INSTALLED), PathBuf::from);
        assert!(
            program.is_file(),
            "no pgbouncer: set {VARIABLE} to its path, or run scripts/servers.sh, which installs it"
        );
        let dir = tempfile::Builder::new()
            .prefix("dlock-pooler-")
            .tempdir()
            .expect("a directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
        let (port, at) = (Port::reserve(), server.port());
        let config = format!(
            "[databases]\n* = host=127.0.0.1 port={at} user=dlock password={}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\nunix_socket_dir =\nauth_type = any\n\
             pool_mode = {mode}\ndefault_pool_size = 20\nmax_client_conn = 500\n",
            server.password,
            port.number()
        );
        let file = dir.path().join("pgbouncer.ini");
        fs::write(&file, config).expect("it can be written");
        give_away(&file).expect("it is given to its user");
        let mut command = Command::new("setpriv");
        if is_root() {
            command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups"]);
        }
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .arg(&file);
        let log = File::create(dir.path().join("log")).expect("a log can be written");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .current_dir(dir.path());
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        let pooler = Pooler { port, child, dir };
        let begun = std::time::Instant::now();
        while let Err(error) = connect(&server.config_at(pooler.addr())).await {
            let said = fs::read_to_string(pooler.dir.path().join("log")).unwrap_or_default();
            assert!(
                begun.elapsed() < PATIENCE,
                "the pooler does not answer ({error}): {said}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        pooler
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port.number()).into()
    }
}

impl fmt::Debug for Pooler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pooler")
            .field("addr", &self.addr())
            .finish_non_exhaustive()
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
