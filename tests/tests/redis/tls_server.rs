//! `rediss://` against a real server: certificates are checked both ways, and a lock works as ever.
//!
//! On Redis alone: the pinned Valkey is built without TLS.

use std::time::Duration;

use dlock::{Error, LockClient};
use dlock_tests::{Certificates, Flavor, Server};

#[tokio::test]
async fn locks_work_over_tls_with_certificates_of_an_authority_of_ones_own() {
    let certificates = Certificates::new();
    let server = Server::builder(Flavor::Redis).tls(&certificates).start().await;
    let port = server.announced().port();
    for url in [
        format!("rediss://localhost:{port}"),
        format!("valkeys://localhost:{port}"),
    ] {
        let builder = certificates.given_to(LockClient::builder().url(url));
        let client = builder.build().await.unwrap();
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
async fn server_or_client_without_a_valid_certificate_is_refused_in_bounded_time() {
    let certificates = Certificates::new();
    let server = Server::builder(Flavor::Redis).tls(&certificates).start().await;
    let port = server.announced().port();
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
    // The server accepts the certificate of these, so that only the client can refuse.
    let shown = || certificates.shown_by(LockClient::builder().url(&url));
    let strangers = Certificates::new();
    let betrayed = shown().root_certificate(strangers.root.clone());
    for (builder, words) in [(shown(), "UnknownIssuer"), (betrayed, "BadSignature")] {
        let error = builder.build().await.unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    }
    // Plain text to a port that speaks TLS.
    let error = LockClient::connect(&format!("redis://localhost:{port}"))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
}

#[tokio::test]
async fn server_whose_certificate_has_another_name_is_refused() {
    let certificates = Certificates::naming(&["localhost"]);
    let server = Server::builder(Flavor::Redis).tls(&certificates).start().await;
    let port = server.announced().port();
    let open = |host: &str| {
        let builder = LockClient::builder().url(format!("rediss://{host}:{port}"));
        certificates.given_to(builder).build()
    };
    open("localhost").await.expect("it is the name");
    let error = open("127.0.0.1").await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().contains("not valid for name"), "{error}");
}
