//! What the compiler says where dlock is used well, and where it is not: see the suites in `tests`.

/// In the editions before 2024, what the last expression of a block borrows lives longer than the variables of the block.
/// A function whose arguments are borrowed there compiles with the attribute as it does without it.
///
/// ```edition2021
/// use std::sync::Mutex;
///
/// use dlock::{distributed_lock, once, Error, LockClient, NotRun};
///
/// struct Batch {
///     rows: Mutex<Vec<u32>>,
/// }
///
/// #[distributed_lock(key = "batch", lock = client)]
/// async fn whole(client: LockClient, batch: Batch) -> Result<usize, Error> {
///     Ok(batch.rows.lock().unwrap().len())
/// }
///
/// struct Job {
///     gen: u64,
/// }
///
/// // No keyword in this edition.
/// #[distributed_lock(key = "job:{job.gen}", lock = client)]
/// async fn generation(client: LockClient, job: Job) -> Result<u64, Error> {
///     Ok(job.gen)
/// }
///
/// #[distributed_lock(key = "batch", lock = client)]
/// async fn in_part(client: LockClient, Batch { ref rows, .. }: Batch) -> Result<usize, Error> {
///     let more = 1;
///     Ok(rows.lock().unwrap().len() + more)
/// }
///
/// #[once(key = "batch", client = client)]
/// async fn only_once(client: LockClient, batch: Batch) -> Result<usize, NotRun> {
///     Ok(batch.rows.lock().unwrap().len())
/// }
///
/// #[async_trait::async_trait]
/// trait Count {
///     async fn whole(&self, batch: Batch) -> Result<usize, Error>;
///     async fn in_part(&self, batch: Batch) -> Result<usize, Error>;
/// }
///
/// #[async_trait::async_trait]
/// impl Count for LockClient {
///     #[distributed_lock(key = "batch", lock = self)]
///     async fn whole(&self, batch: Batch) -> Result<usize, Error> {
///         Ok(batch.rows.lock().unwrap().len())
///     }
///
///     #[distributed_lock(key = "batch", lock = self)]
///     async fn in_part(&self, Batch { rows }: Batch) -> Result<usize, Error> {
///         let more = 1;
///         Ok(rows.lock().unwrap().len() + more)
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let client = LockClient::memory;
/// let batch = || Batch { rows: Mutex::new(vec![1, 2, 3]) };
/// assert_eq!(whole(client(), batch()).await.unwrap(), 3);
/// assert_eq!(in_part(client(), batch()).await.unwrap(), 4);
/// assert_eq!(generation(client(), Job { gen: 3 }).await.unwrap(), 3);
/// assert_eq!(only_once(client(), batch()).await.unwrap(), 3);
/// assert_eq!(client().whole(batch()).await.unwrap(), 3);
/// assert_eq!(client().in_part(batch()).await.unwrap(), 4);
/// # }
/// ```
#[cfg(doctest)]
#[derive(Debug)]
pub struct Edition2021;
