//! Of the layer `base`, what the engine needs.

#[path = "../../../dlock/src/base/broken.rs"]
mod broken;
#[path = "../../../dlock/src/base/cause.rs"]
pub(crate) mod cause;
#[path = "../../../dlock/src/base/hold_state.rs"]
pub(crate) mod hold_state;
#[path = "../../../dlock/src/base/int_hash.rs"]
pub(crate) mod int_hash;
#[path = "../../../dlock/src/base/kind.rs"]
pub(crate) mod kind;
#[path = "../../../dlock/src/base/moment.rs"]
pub(crate) mod moment;

pub(crate) use self::broken::broken;
