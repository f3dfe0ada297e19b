use std::rc::Rc;

use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs")]
async fn shared(count: Rc<u32>) -> Result<(), Error> {
    let also = count.clone();
    std::future::ready(()).await;
    drop(also);
    Ok(())
}

fn spawn(_: impl Future<Output = Result<(), Error>> + Send) {}

fn start() {
    spawn(shared(Rc::new(1)));
}

fn main() {}
