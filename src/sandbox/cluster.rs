//! Three nats-servers as one JetStream cluster: leaders, step-downs, nodes killed and brought back.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::nats::Node;
use super::place::free_port;
use super::{Nats, NatsOptions, Result, SandboxError};

const READY_DEADLINE: Duration = Duration::from_secs(120);
/// In some starts nodes of 2.10 never learn of each other, and a port can be taken by then.
const STARTS: u32 = 3;
const PLACE_DEADLINE: Duration = Duration::from_secs(40);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// One question to JetStream: without a quorum there is no answer.
const ASK_DEADLINE: Duration = Duration::from_secs(2);

/// Three nodes, `n0`, `n1` and `n2`.
#[derive(Debug)]
pub struct NatsCluster {
    nodes: Vec<Nats>,
}

impl NatsCluster {
    /// Starts three nodes and waits until a stream on all of them can be made.
    ///
    /// # Errors
    /// When the program is missing or the cluster does not come up.
    pub async fn start() -> Result<NatsCluster> {
        NatsCluster::start_with(&NatsOptions::default()).await
    }

    /// The same, each node with these options.
    ///
    /// # Errors
    /// When the program is missing or the cluster does not come up.
    pub async fn start_with(options: &NatsOptions) -> Result<NatsCluster> {
        let mut tries = 1;
        loop {
            match NatsCluster::start_once(options).await {
                Err(_) if tries < STARTS => tries += 1,
                done => return done,
            }
        }
    }

    async fn start_once(options: &NatsOptions) -> Result<NatsCluster> {
        let ports = (0..3).map(|_| free_port()).collect::<Result<Vec<u16>>>()?;
        let mut nodes = Vec::new();
        for (index, cluster_port) in ports.iter().enumerate() {
            let node = Node {
                name: format!("n{index}"),
                cluster_port: *cluster_port,
                routes: ports.iter().filter(|port| *port != cluster_port).copied().collect(),
            };
            let mut nats = Nats::prepare(NatsOptions { node: Some(node), ..options.clone() })?;
            nats.launch()?;
            nodes.push(nats);
        }
        let mut cluster = NatsCluster { nodes };
        for node in &mut cluster.nodes {
            node.wait_ready().await?;
        }
        cluster.wait_placeable().await?;
        Ok(cluster)
    }

    /// One node.
    ///
    /// # Errors
    /// When there is no such node.
    pub fn node(&mut self, index: usize) -> Result<&mut Nats> {
        self.nodes.get_mut(index).ok_or_else(|| SandboxError::new(format!("no node n{index}")))
    }

    /// URLs of all nodes.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Nats::url).collect()
    }

    /// A client that knows all nodes.
    ///
    /// # Errors
    /// When no node answers.
    pub async fn connect(&self) -> Result<async_nats::Client> {
        let words = |error: &dyn std::fmt::Display| {
            SandboxError::new(format!("can't connect to the cluster: {error}"))
        };
        let servers = self
            .urls()
            .iter()
            .map(|url| url.parse())
            .collect::<std::result::Result<Vec<async_nats::ServerAddr>, _>>();
        let servers = servers.map_err(|error| words(&error))?;
        async_nats::connect(servers).await.map_err(|error| words(&error))
    }

    /// Index of the node that leads a stream, `None` while nobody does.
    ///
    /// # Errors
    /// When JetStream does not answer, or the stream is missing.
    pub async fn leader(&self, stream: &str) -> Result<Option<usize>> {
        let info = self.ask(&format!("STREAM.INFO.{stream}"), "").await?;
        if let Some(error) = info.get("error") {
            return Err(SandboxError::new(format!("stream {stream}: {error}")));
        }
        let name = info.pointer("/cluster/leader").and_then(Value::as_str).unwrap_or_default();
        Ok(name.strip_prefix('n').and_then(|index| index.parse().ok()))
    }

    /// Asks the stream's leader to step down; another node may lead when this returns, or none yet.
    ///
    /// # Errors
    /// When JetStream does not answer.
    pub async fn step_down(&self, stream: &str) -> Result<()> {
        let answer = self.ask(&format!("STREAM.LEADER.STEPDOWN.{stream}"), "").await?;
        match answer.get("error") {
            None => Ok(()),
            Some(error) => Err(SandboxError::new(format!("step-down of {stream}: {error}"))),
        }
    }

    /// Makes one node the stream's leader.
    ///
    /// # Errors
    /// When that does not come about within a minute.
    pub async fn lead(&self, stream: &str, index: usize) -> Result<()> {
        let start = Instant::now();
        let verb = format!("STREAM.LEADER.STEPDOWN.{stream}");
        let body = format!(r#"{{"placement":{{"preferred":"n{index}"}}}}"#);
        while self.wait_leader(stream).await? != index {
            if start.elapsed() > READY_DEADLINE {
                return Err(SandboxError::new(format!("n{index} does not lead stream {stream}")));
            }
            // A node that has not caught up yet is refused: asked again.
            if self.ask(&verb, &body).await.is_err() {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until the stream has a leader.
    ///
    /// # Errors
    /// After two minutes.
    pub async fn wait_leader(&self, stream: &str) -> Result<usize> {
        let start = Instant::now();
        loop {
            if let Ok(Some(leader)) = self.leader(stream).await {
                return Ok(leader);
            }
            if start.elapsed() > READY_DEADLINE {
                return Err(SandboxError::new(format!("stream {stream} has no leader")));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// `kill -9` of one node.
    ///
    /// # Errors
    /// When there is no such node.
    pub fn kill9(&mut self, index: usize) -> Result<()> {
        self.node(index)?.kill9()
    }

    /// Starts a killed node again and waits until it greets.
    ///
    /// # Errors
    /// When it does not come up.
    pub async fn restart(&mut self, index: usize) -> Result<()> {
        self.node(index)?.restart().await
    }

    /// One request to JetStream's API, through any living node.
    ///
    /// # Errors
    /// When nobody answers within two seconds.
    pub async fn ask(&self, verb: &str, body: &str) -> Result<Value> {
        let words = |error: &dyn std::fmt::Display| {
            SandboxError::new(format!("JetStream's answer to {verb}: {error}"))
        };
        let client = self.connect().await?;
        let request = client.request(format!("$JS.API.{verb}"), body.to_owned().into());
        let answer = tokio::time::timeout(ASK_DEADLINE, request)
            .await
            .map_err(|error| words(&error))?
            .map_err(|error| words(&error))?;
        serde_json::from_slice(&answer.payload).map_err(|error| words(&error))
    }

    /// JetStream has a leader before that one knows all its peers, and a stream on three nodes can't
    /// be placed until then: one is made, and taken away again.
    async fn wait_placeable(&self) -> Result<()> {
        const NAME: &str = "sandbox-ready";
        let body = format!(
            r#"{{"name":"{NAME}","subjects":["{NAME}"],"num_replicas":3,"storage":"memory"}}"#
        );
        let start = Instant::now();
        loop {
            let seen = match self.ask(&format!("STREAM.CREATE.{NAME}"), &body).await {
                Ok(answer) if answer.get("error").is_none() => break,
                Ok(answer) => answer.to_string(),
                Err(error) => error.to_string(),
            };
            if start.elapsed() > PLACE_DEADLINE {
                let logs: Vec<String> = self.nodes.iter().map(Nats::log).collect();
                let logs = logs.join("\n");
                return Err(SandboxError::new(format!("JetStream places nothing: {seen}\n{logs}")));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        self.ask(&format!("STREAM.DELETE.{NAME}"), "").await.map(drop)
    }
}
