//! `GET /metrics`, in Prometheus' text format.

use std::time::Duration;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Counts everything from now on. Call it before the first lock is acquired.
pub(crate) fn install() -> Result<PrometheusHandle, String> {
    let mut builder = PrometheusBuilder::new();
    for (metric, bounds) in dlock::buckets::ALL {
        builder = builder
            .set_buckets_for_metric(Matcher::Full(metric.to_owned()), bounds)
            .map_err(|error| format!("cannot count {metric}: {error}"))?;
    }
    let metrics = builder
        .install_recorder()
        .map_err(|error| format!("cannot install the recorder of metrics: {error}"))?;
    // Recorded values stay in memory until they are sorted into buckets, also if no client requests the metrics.
    let handle = metrics.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            handle.run_upkeep();
        }
    });
    Ok(metrics)
}

pub(crate) fn router(metrics: PrometheusHandle) -> Router {
    let render = move || {
        let metrics = metrics.clone();
        async move {
            metrics.run_upkeep();
            ([(CONTENT_TYPE, "text/plain; version=0.0.4")], metrics.render())
        }
    };
    Router::new().route("/metrics", get(render))
}
