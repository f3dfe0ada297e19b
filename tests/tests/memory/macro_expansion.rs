//! What the expansion calls, and from where: a crate of the same shape as `dlock`, with eyes.

use dlock_macros::distributed_lock;

/// Stands in for `dlock`: what the attribute needs of it is all here.
mod watched {
    use std::panic::Location;
    use std::sync::Mutex;
    use std::time::Duration;

    pub(crate) static CALLS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    pub(crate) static ACQUIRED_AT: Mutex<Option<&'static Location<'static>>> = Mutex::new(None);

    pub(crate) fn note(call: impl Into<String>) {
        CALLS.lock().unwrap().push(call.into());
    }

    #[derive(Debug)]
    pub(crate) struct Error;

    impl Error {
        pub(crate) fn is_busy(&self) -> bool {
            true
        }
    }

    pub(crate) struct Client;
    pub(crate) struct Lock;
    pub(crate) struct Guard;

    impl Lock {
        pub(crate) fn lease(self, time: Duration) -> Lock {
            note(format!("lease {time:?}"));
            self
        }

        pub(crate) fn group(self, group: &'static str) -> Lock {
            note(format!("group {group}"));
            self
        }

        pub(crate) fn wait(self, time: Duration) -> Lock {
            note(format!("wait {time:?}"));
            self
        }

        #[track_caller]
        pub(crate) fn acquire(&self) -> impl Future<Output = Result<Guard, Error>> + use<> {
            *ACQUIRED_AT.lock().unwrap() = Some(Location::caller());
            note("acquire");
            std::future::ready(Ok(Guard))
        }
    }

    pub(crate) mod __macro {
        use super::*;

        pub(crate) fn default_client() -> Result<Client, Error> {
            note("client");
            Ok(Client)
        }

        pub(crate) fn key(key: impl Into<String>) -> String {
            let key = key.into();
            note(format!("key {key}"));
            key
        }

        pub(crate) fn lock(_: Client, key: String) -> Lock {
            note(format!("lock {key}"));
            Lock
        }

        pub(crate) fn acquired<T>(acquired: Result<T, Error>, may_be_handler: bool) -> Result<T, Error> {
            note(if may_be_handler {
                "acquired by a handler"
            } else {
                "acquired"
            });
            acquired
        }

        pub(crate) const fn never<T>() -> Option<T> {
            None
        }

        pub(crate) fn boxed<F>(future: F) -> std::pin::Pin<Box<F>> {
            Box::pin(future)
        }

        pub(crate) struct Frame;
        pub(crate) struct Entrance;

        impl Frame {
            pub(crate) fn new(dropped_on_loss: bool) -> Frame {
                assert!(dropped_on_loss);
                Frame
            }

            pub(crate) fn entrance(&self) -> Entrance {
                Entrance
            }

            pub(crate) async fn run<F: Future>(self, block: F) -> Result<F::Output, Error> {
                let output = block.await;
                note("release");
                Ok(output)
            }
        }

        impl Entrance {
            pub(crate) async fn enter(self, acquired: Result<Guard, Error>) {
                note("enter");
                drop(acquired);
            }
        }

        pub(crate) trait FromLockError {
            fn from_lock_error(error: Error) -> Self;
        }

        impl<T> FromLockError for Result<T, Error> {
            fn from_lock_error(error: Error) -> Self {
                Err(error)
            }
        }
    }
}

fn busy(_: watched::Error) -> Result<u32, watched::Error> {
    Ok(0)
}

struct Last;

impl Drop for Last {
    fn drop(&mut self) {
        watched::note("argument dropped");
    }
}

const ATTRIBUTE_AT: u32 = line!() + 1;
#[distributed_lock(key = "order:{id}", wait = "1s 500ms", lease = "2m", on_busy = busy, crate = watched)]
async fn place(id: u32, _last: Last) -> Result<u32, watched::Error> {
    watched::note("body");
    Ok(id)
}

#[test]
fn every_step_is_in_its_place() {
    let mut call = std::pin::pin!(place(7, Last));
    let outcome = call
        .as_mut()
        .poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert!(matches!(outcome, std::task::Poll::Ready(Ok(7))), "{outcome:?}");
    assert_eq!(
        *watched::CALLS.lock().unwrap(),
        [
            "key order:7",
            "client",
            "lock order:7",
            "group order:{id}",
            "lease 120s",
            "wait 1.5s",
            "acquire",
            // A number is no extractor.
            "acquired",
            "enter",
            "body",
            "argument dropped",
            "release"
        ]
    );

    // What the lock reports about its caller is the attribute.
    let at = watched::ACQUIRED_AT.lock().unwrap().expect("acquired");
    assert_eq!((at.file(), at.line()), (file!(), ATTRIBUTE_AT));
}
