//! Encrypted connections.

use std::io;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::store::options::Tls;

/// The configuration of encrypted connections.
#[derive(Clone)]
pub(super) struct Encryption(TlsConnector);

impl Encryption {
    /// Creates it with these certificates; fails with a message if they are invalid.
    pub(super) fn new(tls: &Tls) -> Result<Encryption, String> {
        let mut roots = RootCertStore::empty();
        match &tls.root {
            Some(pem) => {
                for certificate in certificates(pem, "root_certificate")? {
                    let added = roots.add(certificate);
                    added.map_err(|error| format!("root_certificate: {error}"))?;
                }
            }
            None => {
                let found = rustls_native_certs::load_native_certs();
                if let (true, Some(error)) = (found.certs.is_empty(), found.errors.first()) {
                    return Err(format!("the certificates of the system cannot be read: {error}"));
                }
                roots.add_parsable_certificates(found.certs);
            }
        }
        // The program's crypto provider, if it chose one.
        let ring = || Arc::new(rustls::crypto::ring::default_provider());
        let provider = CryptoProvider::get_default().cloned().unwrap_or_else(ring);
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots);
        let config = match &tls.client {
            Some((chain, key)) => {
                let chain = certificates(chain, "client_certificate")?;
                let key = PrivateKeyDer::from_pem_slice(key);
                let key = key.map_err(|error| format!("the key of client_certificate: {error}"))?;
                let config = config.with_client_auth_cert(chain, key);
                config.map_err(|error| format!("client_certificate: {error}"))?
            }
            None => config.with_no_client_auth(),
        };
        Ok(Encryption(TlsConnector::from(Arc::new(config))))
    }

    /// Encrypts a connection to the host.
    pub(super) async fn wrap(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        self.0.connect(name, stream).await
    }
}

fn certificates(pem: &[u8], option: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match parsed {
        Ok(all) if all.is_empty() => Err(format!("{option} has no certificate in PEM")),
        Ok(all) => Ok(all),
        Err(error) => Err(format!("{option}: {error}")),
    }
}
