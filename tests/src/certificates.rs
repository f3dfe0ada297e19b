//! Certificates for servers that speak TLS, and for their clients.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use dlock::LockClientBuilder;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::process::give_away;

/// An authority of its own, and what it signed: a certificate for servers, at `localhost` and 127.0.0.1 unless it has
/// [other names](Certificates::naming), and one for clients.
#[derive(Debug, Clone)]
pub struct Certificates {
    dir: Arc<TempDir>,
    /// The authority's certificate (PEM).
    pub root: String,
    /// A client's certificate and key (PEM).
    pub client: (String, String),
}

impl Certificates {
    /// New ones, that no others vouch for.
    ///
    /// # Panics
    /// When they cannot be made.
    pub fn new() -> Certificates {
        Certificates::naming(&["localhost", "127.0.0.1"])
    }

    /// The same, with these names in the certificate for servers.
    ///
    /// # Panics
    /// When they cannot be made.
    pub fn naming(names: &[&str]) -> Certificates {
        let made = "certificates can be made";
        let dir = tempfile::Builder::new().prefix("dlock-").tempdir().expect(made);
        let mut authority = CertificateParams::new([]).expect(made);
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect(made);
        let root = authority.self_signed(&key).expect(made).pem();
        let issuer = Issuer::new(authority, key);
        let signed = |names: &[&str]| {
            let key = KeyPair::generate().expect(made);
            let all: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            let mut params = CertificateParams::new(all).expect(made);
            // Named apart from its issuer, or OpenSSL takes it for signed by itself.
            params.distinguished_name.push(DnType::CommonName, names[0]);
            let certificate = params.signed_by(&key, &issuer).expect(made).pem();
            (certificate, key.serialize_pem())
        };
        let (certificate, key) = signed(names);
        let client = signed(&["client"]);
        let files = [
            ("root.pem", &root),
            ("server.pem", &certificate),
            ("server.key", &key),
        ];
        // Servers that refuse root read them as another user.
        give_away(dir.path());
        for (name, text) in files {
            let file = dir.path().join(name);
            fs::write(&file, text).expect(made);
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect(made);
            give_away(&file);
        }
        let dir = Arc::new(dir);
        Certificates { dir, root, client }
    }

    /// A client that trusts the authority, and that it vouches for.
    pub fn given_to(&self, builder: LockClientBuilder) -> LockClientBuilder {
        self.shown_by(builder).root_certificate(self.root.clone())
    }

    /// A client that the authority vouches for, so that servers accept it, and that may trust another.
    pub fn shown_by(&self, builder: LockClientBuilder) -> LockClientBuilder {
        let (certificate, key) = self.client.clone();
        builder.client_certificate(certificate, key)
    }

    /// One of its files: `root.pem`, `server.pem` or `server.key`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What a server is told of them: names and values of its configuration.
    pub(crate) fn config(&self) -> [(&'static str, PathBuf); 3] {
        let path = |name: &str| self.file(name);
        [
            ("tls-ca-cert-file", path("root.pem")),
            ("tls-cert-file", path("server.pem")),
            ("tls-key-file", path("server.key")),
        ]
    }
}

impl Default for Certificates {
    fn default() -> Self {
        Certificates::new()
    }
}
