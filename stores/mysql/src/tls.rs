//! Whether rustls can be started by the driver.
//!
//! The driver leaves the choice of a cryptography provider to rustls. rustls chooses the only one that it was built with; if
//! another dependency of the program has added a second, it panics unless the program has installed one of them.

use rustls::crypto::CryptoProvider;

/// Returns why the driver cannot encrypt, if so.
pub(crate) fn obstacle() -> Option<&'static str> {
    let is_open = CryptoProvider::get_default().is_none() && has_second_provider();
    is_open.then_some(
        "this program has two cryptography providers of rustls, ring and aws-lc-rs: when it starts, install one as its \
         default, as by rustls::crypto::ring::default_provider().install_default()",
    )
}

/// Whether rustls was built with `aws-lc-rs` besides `ring`. Features of a dependency cannot be asked for, but the feature
/// adds a module: where it is missing, the name means the one of `without`.
fn has_second_provider() -> bool {
    #[allow(unused_imports)]
    use without::*;
    {
        #[allow(unused_imports)]
        use rustls::crypto::*;

        is_there(aws_lc_rs::default_provider)
    }
}

fn is_there<P: Provider>(_: fn() -> P) -> bool {
    P::IS_THERE
}

trait Provider {
    const IS_THERE: bool;
}

impl Provider for CryptoProvider {
    const IS_THERE: bool = true;
}

impl Provider for without::Missing {
    const IS_THERE: bool = false;
}

#[allow(dead_code)]
mod without {
    pub(super) struct Missing;

    pub(super) mod aws_lc_rs {
        pub(in super::super) fn default_provider() -> super::Missing {
            super::Missing
        }
    }
}
