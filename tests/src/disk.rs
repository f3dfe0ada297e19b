//! Small disks, which tests fill.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::child;
use crate::process::{is_root, unprivileged};

/// Mounts a disk of `$1` bytes on `$0`, and continues as the command after that.
const MOUNT: &str = r#"mount -t tmpfs -o "size=$1,mode=0777" dlock-disk "$0" && shift && exec "$@""#;
/// Keeps the disk until the standard input ends. Before this command, the process may still belong to root.
const KEEP: [&str; 3] = ["sh", "-c", "echo mounted && exec cat"];

/// A disk in memory. It is mounted in the namespace of one process, whose end unmounts it. Other processes find it at its
/// [`path`](Disk::path), or run [`inside`](Disk::inside) the namespace.
#[derive(Debug)]
pub(crate) struct Disk {
    keeper: Child,
    path: PathBuf,
}

impl Disk {
    /// A disk of this many bytes, on an empty directory.
    ///
    /// # Panics
    /// When no file system can be mounted in a mount namespace of its own.
    pub(crate) fn new(bytes: u64, on: &Path) -> Disk {
        let mut command = child::command("unshare");
        command.arg("--mount");
        if !is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["sh", "-c", MOUNT]).arg(on).arg(bytes.to_string());
        // As the user of the servers, who has no access to `/proc/PID/root` of root.
        let user = unprivileged();
        command.arg(user.get_program()).args(user.get_args()).args(KEEP);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut keeper = child::spawn(command).expect("setpriv (package util-linux) can be started");
        let mut said = [0; 8];
        let mounted = keeper.stdout.as_mut().map(|stdout| stdout.read_exact(&mut said));
        if !matches!(mounted, Some(Ok(()))) {
            let said = keeper
                .wait_with_output()
                .map(|output| output.stderr)
                .unwrap_or_default();
            panic!(
                "no small disk: `unshare --mount` and `mount -t tmpfs` (package util-linux) need root, or \
                 `unshare --user` has to be allowed: {}",
                String::from_utf8_lossy(&said)
            );
        }
        let root = format!("/proc/{}/root", keeper.id());
        let inside = on.strip_prefix("/").expect("an absolute path");
        Disk {
            path: Path::new(&root).join(inside),
            keeper,
        }
    }

    /// Where it is, for this process and for servers.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A command for a program, which is to be added, that finds the disk where it was mounted. If this process is not root,
    /// the program is root of a user namespace.
    pub(crate) fn inside(&self) -> Command {
        let mut command = child::command("nsenter");
        command
            .arg(format!("--target={}", self.keeper.id()))
            .arg("--mount");
        if !is_root() {
            command.args(["--user", "--preserve-credentials"]);
        }
        command.arg("--");
        command
    }

    /// Takes all the space that is left.
    ///
    /// # Panics
    /// When it cannot be written to.
    pub(crate) fn fill(&self) {
        let block = [7; 1 << 16];
        let mut file = File::options()
            .create(true)
            .append(true)
            .open(self.filling())
            .expect("it is mounted");
        let mut size = block.len();
        while size > 0 {
            match file.write(&block[..size]) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => size /= 2,
                Err(error) => panic!("the disk cannot be filled: {error}"),
            }
        }
    }

    /// Frees the space that [`fill`](Disk::fill) took.
    ///
    /// # Panics
    /// When nothing was taken.
    pub(crate) fn free(&self) {
        fs::remove_file(self.filling()).expect("it was filled");
    }

    fn filling(&self) -> PathBuf {
        self.path.join("filling")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}
