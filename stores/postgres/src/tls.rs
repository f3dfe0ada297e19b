//! The connector for encrypted connections.

use std::sync::Arc;

use dlock::store::{Reason, StoreError};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres_rustls::MakeRustlsConnect;

/// Returns a connector that verifies the server's certificate and its name. The files have the authority to trust instead of
/// those of the system, and the client's certificate and its private key.
pub(crate) async fn connector(
    root: Option<&str>,
    client: Option<(&str, &str)>,
) -> Result<MakeRustlsConnect, StoreError> {
    // The program's crypto provider, if it chose one.
    let ring = || Arc::new(rustls::crypto::ring::default_provider());
    let provider = CryptoProvider::get_default().cloned().unwrap_or_else(ring);
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&error.to_string()))?
        .with_root_certificates(roots(root).await?);
    let config = match client {
        Some((certificate, key)) => {
            let chain = certificates("sslcert", certificate).await?;
            let key = PrivateKeyDer::from_pem_slice(&read("sslkey", key).await?)
                .map_err(|error| wrong(&format!("sslkey: {error}")))?;
            config
                .with_client_auth_cert(chain, key)
                .map_err(|error| wrong(&format!("sslcert: {error}")))?
        }
        None => config.with_no_client_auth(),
    };
    Ok(MakeRustlsConnect::new(config))
}

async fn roots(file: Option<&str>) -> Result<RootCertStore, StoreError> {
    let mut roots = RootCertStore::empty();
    let Some(file) = file else {
        let found = rustls_native_certs::load_native_certs();
        if let (true, Some(error)) = (found.certs.is_empty(), found.errors.first()) {
            return Err(wrong(&format!(
                "the certificates of the system cannot be read: {error}"
            )));
        }
        roots.add_parsable_certificates(found.certs);
        return Ok(roots);
    };
    for certificate in certificates("sslrootcert", file).await? {
        roots
            .add(certificate)
            .map_err(|error| wrong(&format!("sslrootcert: {error}")))?;
    }
    Ok(roots)
}

async fn certificates(option: &str, file: &str) -> Result<Vec<CertificateDer<'static>>, StoreError> {
    let pem = read(option, file).await?;
    match CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>() {
        Ok(all) if all.is_empty() => Err(wrong(&format!("{option}: \"{file}\" has no certificate in PEM"))),
        Ok(all) => Ok(all),
        Err(error) => Err(wrong(&format!("{option}: {error}"))),
    }
}

async fn read(option: &str, file: &str) -> Result<Vec<u8>, StoreError> {
    tokio::fs::read(file)
        .await
        .map_err(|error| wrong(&format!("{option}: \"{file}\" cannot be read: {error}")))
}

fn wrong(reason: &str) -> StoreError {
    StoreError::not_done(Reason::WrongUrl, reason)
}
