//! Certificates and private keys in PEM.
//!
//! The gRPC library takes a text without certificates for one with none to trust, and every server is refused then.

#[cfg(feature = "tls")]
use rustls::RootCertStore;
#[cfg(feature = "tls")]
use rustls::pki_types::pem::PemObject;
#[cfg(feature = "tls")]
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// What a text in PEM is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pem {
    /// The authorities to trust.
    Authority,
    /// The client's certificate.
    Certificate,
    /// The client's private key.
    PrivateKey,
}

impl Pem {
    /// Checks that the text can be used so; otherwise returns the reason.
    #[cfg(feature = "tls")]
    pub(crate) fn check(self, text: &[u8]) -> Result<(), &'static str> {
        let (is_there, otherwise) = match self {
            Pem::Authority => (has_authority(text), "it has no certificate in PEM"),
            Pem::Certificate => (!certificates(text).is_empty(), "it has no certificate in PEM"),
            Pem::PrivateKey => (
                PrivateKeyDer::from_pem_slice(text).is_ok(),
                "it has no private key in PEM",
            ),
        };
        if is_there { Ok(()) } else { Err(otherwise) }
    }

    #[cfg(not(feature = "tls"))]
    pub(crate) fn check(self, _text: &[u8]) -> Result<(), &'static str> {
        Ok(())
    }
}

/// Returns the certificates of a text; none if it is malformed.
#[cfg(feature = "tls")]
fn certificates(text: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(text)
        .collect::<Result<_, _>>()
        .unwrap_or_default()
}

#[cfg(feature = "tls")]
fn has_authority(text: &[u8]) -> bool {
    RootCertStore::empty()
        .add_parsable_certificates(certificates(text))
        .0
        > 0
}
