//! Health, metrics, status and the console page over HTTP. Every answer comes from [`Status`] in
//! memory: an endpoint never waits for PostgreSQL or NATS, so it answers while both hang.

pub mod destination;
pub mod histogram;
pub mod metrics;
pub mod report;
pub mod retention;
pub mod status;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::error::{Failure, Kind};
use metrics::Exporter;
use report::{Report, Verdict};
pub use status::{Phase, Source, Status};

/// Between two marks of the percentiles' window.
const MARK_INTERVAL: Duration = Duration::from_secs(5);

/// How long a stop waits for answers that are being written.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// The page, with all it needs.
const CONSOLE: &str = include_str!("console.html");

/// What the page may do: run its own script, ask its own server.
const CONSOLE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; \
     script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'";

struct App {
    status: Arc<Status>,
    exporter: Exporter,
}

/// Answers on `listen` until `stop`.
pub async fn serve(
    listen: SocketAddr,
    status: Arc<Status>,
    stop: CancellationToken,
) -> Result<(), Failure> {
    let listener = bind(listen).await?;
    answer(listener, status, stop).await
}

/// Takes the address, so that a start fails early when another process has it.
pub async fn bind(listen: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(listen).await.map_err(|error| {
        Failure::new(Kind::AdminAddress, format!("can't listen on {listen}: {error}"))
    })
}

/// Answers on a socket that [`bind`] gave, until `stop`.
pub async fn answer(
    listener: TcpListener,
    status: Arc<Status>,
    stop: CancellationToken,
) -> Result<(), Failure> {
    let app = Arc::new(App { status: Arc::clone(&status), exporter: Exporter::new() });
    let router = Router::new()
        .route("/", get(console))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/healthz", get(healthz))
        .route("/metrics", get(metrics_text))
        .route("/api/status", get(api_status))
        .with_state(app);
    let stopped = stop.clone().cancelled_owned();
    let server = axum::serve(listener, router).with_graceful_shutdown(stopped);
    let server = async { server.await.map_err(|error| failed(&error)) };
    tokio::pin!(server);
    let mut marks = interval(MARK_INTERVAL);
    marks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            ended = &mut server => return ended,
            () = stop.cancelled() => break,
            _ = marks.tick() => status.mark(),
        }
    }
    // A client that does not read its answer is not waited for.
    timeout(LAST_ANSWERS, server).await.unwrap_or(Ok(()))
}

fn failed(error: &std::io::Error) -> Failure {
    Failure::new(Kind::AdminAddress, format!("the admin endpoints ended: {error}"))
}

async fn console() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, CONSOLE_POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, CONSOLE).into_response()
}

/// The process is alive, or this would not answer. Outages of others don't matter here: a restart
/// would not heal them.
async fn livez() -> Response {
    json(StatusCode::OK, &Verdict { ok: true, causes: Vec::new() })
}

async fn readyz(State(app): State<Arc<App>>) -> Response {
    let report = Report::of(&app.status);
    json(code(&report.ready), &Readiness { verdict: report.ready, phase: report.phase })
}

/// Ready to relay, or to take over: the phase tells which.
#[derive(serde::Serialize)]
struct Readiness {
    #[serde(flatten)]
    verdict: Verdict,
    phase: Phase,
}

async fn healthz(State(app): State<Arc<App>>) -> Response {
    verdict(&Report::of(&app.status).healthy)
}

async fn api_status(State(app): State<Arc<App>>) -> Response {
    json(StatusCode::OK, &Report::of(&app.status))
}

async fn metrics_text(State(app): State<Arc<App>>) -> Response {
    let text = app.exporter.render(&app.status);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

fn verdict(verdict: &Verdict) -> Response {
    json(code(verdict), verdict)
}

fn code(verdict: &Verdict) -> StatusCode {
    if verdict.ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

fn json(code: StatusCode, body: &impl serde::Serialize) -> Response {
    let headers =
        [(header::CACHE_CONTROL, "no-store"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (code, headers, axum::Json(body)).into_response()
}

/// What a panicking holder left is still a figure: nothing here spans two locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
