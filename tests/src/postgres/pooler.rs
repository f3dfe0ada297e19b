//! PgBouncer before a server.

use std::ops::Deref;
use std::path::PathBuf;
use std::time::Instant;
use std::{env, fs};

use super::{Postgres, connect};
use crate::process::{Process, give_away, unprivileged};

/// Where the program is, if not where Debian puts it.
const VARIABLE: &str = "DLOCK_PGBOUNCER";
const INSTALLED: &str = "/usr/sbin/pgbouncer";

/// A PgBouncer of its own, with few connections to its server. It is killed when this is dropped.
#[derive(Debug)]
pub struct Pooler {
    process: Process,
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
        let process = Process::new("dlock-pooler-");
        let config = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=dlock password={}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\nunix_socket_dir =\nauth_type = any\n\
             pool_mode = {mode}\ndefault_pool_size = 20\nmax_client_conn = 500\n",
            server.port(),
            server.password,
            process.port()
        );
        let file = process.dir().join("pgbouncer.ini");
        fs::write(&file, config).expect("it can be written");
        give_away(&file);
        let mut command = unprivileged();
        command.arg(program).arg(&file);
        process.launch(command);
        let launched = Instant::now();
        while let Err(error) = connect(&server.config_at(process.addr())).await {
            process.is_starting(launched, error).await;
        }
        Pooler { process }
    }
}

impl Deref for Pooler {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}
