//! What a consumer sees of a row: subjects, headers, ids, and what no row may put into them.

use super::*;
use crate::event::{EventId, Reason, RunHash, UnixMicros};
use crate::lsn::{Lsn, Position};
use proptest::prelude::*;

fn event(kind: &str) -> Event {
    Event {
        seq: 7,
        position: Some(Position { commit_lsn: Lsn(0x16_0000_0001), index: 0 }),
        id: EventId::Uuid(uuid::Uuid::from_u128(0xABCD)),
        run: Some(Bytes::from_static(b"order-1")),
        run_hash: RunHash::of_run(b"order-1"),
        kind: Bytes::copy_from_slice(kind.as_bytes()),
        tenant: Some(Bytes::from_static(b"acme")),
        version: Some(3),
        payload: Some(Bytes::from_static(b"{\"a\": 1}")),
        headers: None,
        created_at: Some(UnixMicros(1_700_000_000_123_456)),
        committed_at: None,
        fault: None,
    }
}

fn envelope(template: &str) -> Envelope {
    Envelope {
        relay: "orders".into(),
        generation: 2,
        stream: "EVENTS".into(),
        template: Template::parse(template).unwrap(),
        id_suffix: None,
        replay: None,
    }
}

fn with_headers(json: &str) -> Result<Message, Fault> {
    let mut event = event("a");
    event.headers = Some(Bytes::copy_from_slice(json.as_bytes()));
    encode(&event, &envelope("events.{kind}"))
}

fn header<'a>(message: &'a Message, name: &str) -> Option<&'a str> {
    message.headers().get(name)
}

#[test]
fn a_message_says_what_it_is() {
    let message = encode(&event("order.created"), &envelope("events.{kind}")).unwrap();
    assert_eq!(message.subject(), "events.order.created");
    assert_eq!(message.id(), "00000000-0000-0000-0000-00000000abcd");
    let expected = [
        ("Nats-Expected-Stream", "EVENTS"),
        ("Outbox-Relay", "orders"),
        ("Outbox-Generation", "2"),
        ("Outbox-Run", "order-1"),
        ("Outbox-Kind", "order.created"),
        ("Outbox-Version", "3"),
        ("Outbox-Tenant", "acme"),
        ("Outbox-Seq", "7"),
        ("Outbox-Lsn", "16/1"),
        ("Outbox-Created-At", "2023-11-14T22:13:20.123456Z"),
    ];
    for (name, value) in expected {
        assert_eq!(header(&message, name), Some(value), "{name}");
    }
    assert_eq!(message.headers().iter().count(), expected.len() + 1);
    assert_eq!(message.payload, "{\"a\": 1}");
}

/// The block from its documented form.
fn wire(message: &Message) -> String {
    let mut text = String::from("NATS/1.0\r\n");
    for (name, value) in message.headers().iter() {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text + "\r\n"
}

#[test]
fn size_counts_headers_as_the_wire_does() {
    let message = with_headers(r#"{"X-A": "ü", "X-B": [1, 2.50, true]}"#).unwrap();
    assert_eq!(message.head(), wire(&message));
    assert_eq!(message.size(), wire(&message).len() + message.payload.len());
}

#[test]
fn null_payload_is_a_tombstone_and_empty_payload_is_not() {
    let mut tombstone = event("a");
    tombstone.payload = None;
    let message = encode(&tombstone, &envelope("events.{kind}")).unwrap();
    assert_eq!((message.payload.len(), header(&message, "Outbox-Tombstone")), (0, Some("true")));
    let mut empty = event("a");
    empty.payload = Some(Bytes::new());
    let message = encode(&empty, &envelope("events.{kind}")).unwrap();
    assert_eq!(header(&message, "Outbox-Tombstone"), None);
}

#[test]
fn row_headers_keep_their_text() {
    let json = r#"{"traceparent": "00-abc", "X-N": 123456789012345678901234567890, "X-F": 1.50,
                   "X-T": true, "X-Null": null, "X-Many": ["a", 2], "X-Empty": []}"#;
    let message = with_headers(json).unwrap();
    assert_eq!(header(&message, "traceparent"), Some("00-abc"));
    assert_eq!(header(&message, "X-N"), Some("123456789012345678901234567890"));
    assert_eq!(header(&message, "X-F"), Some("1.50"));
    assert_eq!(header(&message, "X-T"), Some("true"));
    assert_eq!(header(&message, "X-Null"), None);
    assert_eq!(header(&message, "X-Empty"), None);
    let many: Vec<_> = message.headers().get_all("X-Many").collect();
    assert_eq!(many, ["a", "2"]);
    assert!(with_headers("null").is_ok() && with_headers("{}").is_ok());
}

#[test]
fn hostile_headers_are_refused() {
    for json in [
        r#"{"X": "a\r\nX-Injected: 1"}"#,
        r#"{"X": "a\r\n\r\nrest"}"#,
        r#"{"X": "a\nb"}"#,
        r#"{"X": "a\rb"}"#,
        r#"{"X": "a\u0000b"}"#,
        r#"{"X": ["fine", "a\nb"]}"#,
        r#"{"": "a"}"#,
        r#"{"X Y": "a"}"#,
        r#"{"X:Y": "a"}"#,
        r#"{"X\r\nY": "a"}"#,
        r#"{"Größe": "a"}"#,
        r#"{"Nats-Msg-Id": "a"}"#,
        r#"{"nATS-Rollup": "all"}"#,
        r#"{"OUTBOX-Seq": "1"}"#,
        r#"{"Status": "503"}"#,
        r#"{"X": {"a": 1}}"#,
        r#"{"X": [["a"]]}"#,
        r#"{"X": [null]}"#,
        r#"["X"]"#,
        r#""X""#,
        r#"{"X": "a"} {"Y": "b"}"#,
        r#"{"X": "a""#,
        "",
    ] {
        let fault = with_headers(json).expect_err(json);
        assert_eq!(fault.reason, Reason::Header, "{json}");
        assert!(!fault.detail.contains(['\r', '\n', '\0']), "{:?}", fault.detail);
    }
}

#[test]
fn a_header_block_over_the_servers_limit_is_too_large() {
    let json = format!("{{\"X\": \"{}\"}}", "a".repeat(MAX_HEADER_BYTES));
    assert_eq!(with_headers(&json).expect_err("too long").reason, Reason::TooLarge);
}

#[test]
fn control_characters_in_columns_are_refused_in_headers_and_escaped_in_subjects() {
    let mut hostile = event("a");
    hostile.run = Some(Bytes::from_static(b"x\r\nPUB other 1\r\nx"));
    let fault = encode(&hostile, &envelope("events.{kind}")).unwrap_err();
    assert_eq!(fault.reason, Reason::Header);
    let subject = Template::parse("events.{run_id}").unwrap().render(&hostile).unwrap();
    assert_eq!(subject, "events.x%0D%0APUB%20other%201%0D%0Ax");
}

#[test]
fn ids_stay_apart_across_outboxes_and_destinations() {
    let mut numbered = event("a");
    numbered.id = EventId::Int(1);
    let mut envelope = envelope("events.{kind}");
    assert_eq!(encode(&numbered, &envelope).unwrap().id(), "orders:2:1");
    envelope.id_suffix = Some("audit".into());
    assert_eq!(encode(&numbered, &envelope).unwrap().id(), "orders:2:1:audit");
    for blank in ["", " ", "\t", " a", "a "] {
        numbered.id = EventId::Text(blank.into());
        assert_eq!(encode(&numbered, &envelope).unwrap_err().reason, Reason::Unmappable);
    }
}

#[test]
fn only_our_own_originals_are_recognised() {
    let ours = envelope("events.{kind}");
    let message = encode(&event("a"), &ours).unwrap();
    let found = parse_identity(message.headers(), &ours, 9).unwrap();
    assert_eq!((found.seq, found.generation, found.stream_seq), (7, 2, 9));
    assert_eq!(found.id, event("a").id);
    assert_eq!(found.commit_lsn, Some(Lsn(0x16_0000_0001)));

    let other_relay = Envelope { relay: "others".into(), ..ours.clone() };
    assert_eq!(parse_identity(message.headers(), &other_relay, 9), None);
    let other_destination = Envelope { id_suffix: Some("audit".into()), ..ours.clone() };
    assert_eq!(parse_identity(message.headers(), &other_destination, 9), None);
    let theirs = encode(&event("a"), &other_destination).unwrap();
    assert_eq!(parse_identity(theirs.headers(), &ours, 9), None);

    assert_eq!(parse_identity(Headers::default(), &ours, 9), None);
}

/// Resume of the relay must not take a copy for the event's message, which may be lost; a replay
/// that goes on must find its own copies and no others.
#[test]
fn a_replay_recognises_its_own_copies_and_nobody_else_does() {
    for id_suffix in [None, Some("audit".to_owned())] {
        let relay = Envelope { id_suffix, ..envelope("events.{kind}") };
        let job = |name: &str| Envelope { replay: Some(name.to_owned()), ..relay.clone() };
        let original = encode(&event("a"), &relay).unwrap();
        let copy = encode(&event("a"), &job("job-1")).unwrap();
        assert_eq!(copy.id(), format!("{}:replay:job-1", original.id()));
        assert_eq!(header(&copy, "Outbox-Replay"), Some("job-1"));
        assert_eq!(header(&original, "Outbox-Replay"), None);
        assert_eq!((copy.subject(), &copy.payload), (original.subject(), &original.payload));

        let found = parse_identity(copy.headers(), &job("job-1"), 9).unwrap();
        assert_eq!((found.seq, found.id), (7, event("a").id));
        assert_eq!(parse_identity(copy.headers(), &relay, 9), None);
        assert_eq!(parse_identity(copy.headers(), &job("job-2"), 9), None);
        assert_eq!(parse_identity(original.headers(), &job("job-1"), 9), None);
    }
}

#[test]
fn templates_say_what_is_wrong_with_them() {
    for (text, offset) in [
        ("", 0),
        (".a", 0),
        ("a.", 2),
        ("a..b", 2),
        ("a.*", 2),
        ("a.>", 2),
        ("a b", 1),
        ("a.{kind", 2),
        ("a.}", 2),
        ("a.{nope}", 2),
        ("a.{kind}.b", 2),
        ("{kind}{kind}", 0),
        ("$JS.API.{id}", 0),
    ] {
        assert_eq!(Template::parse(text).map_err(|error| error.offset), Err(offset), "{text}");
    }
}

#[test]
fn filters_match_what_templates_render() {
    for (text, filter) in [
        ("events.{kind}", "events.>"),
        ("events.v1-{kind}", "events.>"),
        ("{tenant}.events.{run_id}-{seq}.{kind}", "*.events.*.>"),
        ("events.{tenant}", "events.*"),
        ("events.all", "events.all"),
    ] {
        let template = Template::parse(text).unwrap();
        assert_eq!(template.filter_subject(), filter);
        assert_eq!(template.to_string(), text);
    }
    assert_eq!(Template::default(), Template::parse("events.{kind}").unwrap());
    assert_eq!(Template::parse("e.{id}.{kind}").unwrap().sample("a.b"), "e.a%2Eb.a.b");
}

#[test]
fn empty_and_over_long_subjects_are_faults() {
    let render = |template: &str, event: &Event| Template::parse(template).unwrap().render(event);
    let mut bare = event("");
    bare.tenant = None;
    bare.version = None;
    for template in ["events.{kind}", "events.{tenant}", "events.{version}"] {
        assert_eq!(render(template, &bare).unwrap_err().reason, Reason::Subject, "{template}");
    }
    let long = event(&"a".repeat(MAX_SUBJECT_BYTES));
    assert_eq!(render("events.{kind}", &long).unwrap_err().reason, Reason::Subject);
}

#[test]
fn a_fault_found_earlier_is_kept() {
    let mut broken = event("a");
    let fault = Fault::new(Reason::Unmappable, "no kind");
    broken.fault = Some(fault.clone());
    assert_eq!(encode(&broken, &envelope("events.{kind}")).unwrap_err(), fault);
}

fn is_token(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_%".contains(&byte))
}

proptest! {
    #[test]
    fn escaping_is_reversible_and_gives_tokens(value in "\\PC*|[.\\r\\n\\t *>$%a]{0,12}") {
        let mut event = event(&value);
        event.tenant = Some(Bytes::copy_from_slice(value.as_bytes()));
        for (template, tokens) in [("e.{tenant}", 2), ("e.{kind}", usize::MAX)] {
            match Template::parse(template).unwrap().render(&event) {
                Ok(subject) => {
                    prop_assert!(subject.split('.').all(is_token), "{}", subject);
                    prop_assert!(subject.split('.').count() <= tokens);
                    let token = subject.strip_prefix("e.").unwrap();
                    prop_assert_eq!(unescape(token), Some(value.clone()));
                }
                Err(fault) => {
                    prop_assert_eq!(fault.reason, Reason::Subject);
                    prop_assert!(value.is_empty() || value.len() > MAX_SUBJECT_BYTES / 3 - 2);
                }
            }
        }
    }

    #[test]
    fn nothing_in_a_row_panics_or_adds_a_line(
        name in "\\PC{0,8}|[a-z\\r\\n: ]{1,8}",
        value in "\\PC{0,8}|[a-z\\r\\n\\x00: ]{1,8}",
        run in "\\PC{0,8}|[a-z\\r\\n\\x00: ]{1,8}",
    ) {
        let mut event = event("a");
        event.run = Some(Bytes::copy_from_slice(run.as_bytes()));
        event.headers = Some(serde_json::json!({ &name: &value }).to_string().into());
        if let Ok(message) = encode(&event, &envelope("events.{kind}")) {
            // Eleven of ours, one of the row's, the version line, and the two ends.
            prop_assert_eq!(message.head().split("\r\n").count(), 11 + 1 + 3);
            prop_assert_eq!(message.headers().iter().count(), 11 + 1);
            prop_assert_eq!(message.head().split('\n').count(), 11 + 1 + 3);
            prop_assert_eq!(message.size(), message.head().len() + message.payload.len());
        }
    }

    #[test]
    fn templates_never_panic(text in "\\PC*|[a{}.kindseq*>$]{0,20}") {
        if let Ok(template) = Template::parse(&text) {
            prop_assert_eq!(template.to_string(), text);
            template.render(&event("k")).ok();
        }
    }
}

/// The table of docs/messages.md: consumers in any language write the way back after it.
#[test]
fn the_documented_examples_are_true() {
    let page = include_str!("../../docs/messages.md");
    let rows = page.lines().skip_while(|line| *line != "| template | value | subject |").skip(2);
    let mut seen = 0;
    for row in rows.take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('`').skip(1).step_by(2).collect();
        let [template, value, subject] = cells[..] else { panic!("{row}") };
        let mut event = event(value);
        event.run = Some(Bytes::copy_from_slice(value.as_bytes()));
        event.tenant = event.run.clone();
        assert_eq!(Template::parse(template).unwrap().render(&event).unwrap(), subject, "{row}");
        let (before, after) = template.split_once('{').unwrap();
        let (_, after) = after.split_once('}').unwrap();
        let token = subject.strip_prefix(before).unwrap().strip_suffix(after).unwrap();
        assert_eq!(unescape(token).as_deref(), Some(value), "{row}");
        seen += 1;
    }
    assert!(seen >= 8);
}
