//! `rediss://` against a real server: certificates are checked both ways, and a lock works as ever.
//!
//! On Redis alone: the pinned Valkey is built without TLS.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use dlock::{Error, LockClient};
use dlock_tests::{Flavor, Server};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// An authority, and what it signed.
struct Certificates {
    dir: tempfile::TempDir,
    root: String,
    client: (String, String),
}

fn certificates() -> Certificates {
    let dir = tempfile::tempdir().unwrap();
    let mut authority = CertificateParams::new([]).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let root = authority.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(authority, key);
    let signed = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        // Named apart from its issuer, or OpenSSL takes it for signed by itself.
        params.distinguished_name.push(DnType::CommonName, name);
        (
            params.signed_by(&key, &issuer).unwrap().pem(),
            key.serialize_pem(),
        )
    };
    let (certificate, key) = signed("localhost");
    std::fs::write(dir.path().join("root.pem"), &root).unwrap();
    std::fs::write(dir.path().join("server.pem"), certificate).unwrap();
    std::fs::write(dir.path().join("server.key"), key).unwrap();
    let client = signed("client");
    Certificates { dir, root, client }
}

async fn server(certificates: &Certificates) -> (Server, u16) {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let path = |name: &str| Path::join(certificates.dir.path(), name).display().to_string();
    let server = Server::builder(Flavor::Redis)
        .config("tls-port", &port.to_string())
        .config("tls-ca-cert-file", &path("root.pem"))
        .config("tls-cert-file", &path("server.pem"))
        .config("tls-key-file", &path("server.key"))
        .start()
        .await;
    (server, port)
}

#[tokio::test]
async fn locks_work_over_tls_with_certificates_of_an_authority_of_ones_own() {
    let certificates = certificates();
    let (server, port) = server(&certificates).await;
    for url in [
        format!("rediss://localhost:{port}"),
        format!("valkeys://localhost:{port}"),
    ] {
        let client = LockClient::builder()
            .url(url)
            .root_certificate(certificates.root.clone())
            .client_certificate(certificates.client.0.clone(), certificates.client.1.clone())
            .build()
            .await
            .unwrap();
        let guard = client.lock("k").acquire().await.unwrap();
        let waiter = tokio::spawn(client.lock("k").wait(Duration::from_secs(60)).acquire());
        tokio::time::sleep(Duration::from_millis(100)).await;
        guard.release().await.unwrap();
        waiter.await.unwrap().unwrap().release().await.unwrap();
        client.shutdown(Duration::ZERO).await;
    }
    assert_eq!(server.keys().await, ["dlock:fence"]);
}

#[tokio::test]
async fn a_server_or_a_client_that_nobody_vouches_for_is_refused_in_bounded_time() {
    let certificates = certificates();
    let (_server, port) = server(&certificates).await;
    let url = format!("rediss://:hunter2@localhost:{port}");
    let unknown = LockClient::builder().url(&url);
    let anonymous = LockClient::builder()
        .url(&url)
        .root_certificate(certificates.root.clone());
    let garbage = LockClient::builder()
        .url(&url)
        .root_certificate("not a certificate");
    for builder in [unknown, anonymous, garbage] {
        let error = tokio::time::timeout(Duration::from_secs(60), builder.build())
            .await
            .unwrap()
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Unreachable { .. } | Error::Refused { .. } | Error::InvalidOption { .. }
            ),
            "{error:?}"
        );
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
    // Plain text to a port that speaks TLS.
    let error = LockClient::connect(&format!("redis://localhost:{port}"))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
}
