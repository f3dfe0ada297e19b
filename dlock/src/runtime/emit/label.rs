//! The labels of metrics and spans.

/// Defines a label: its values, the list of them, and their names.
macro_rules! label {
    ($(#[$about:meta])* $label:ident { $($(#[$each:meta])* $value:ident = $name:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $label { $($(#[$each])* $value,)* }

        #[cfg_attr(not(feature = "metrics"), allow(dead_code, reason = "only metrics have some of the labels"))]
        impl $label {
            pub(super) const ALL: [$label; [$($name),*].len()] = [$($label::$value),*];

            pub(super) fn name(self) -> &'static str {
                match self { $($label::$value => $name,)* }
            }
        }
    };
}

pub(super) use label;
