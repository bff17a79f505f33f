//! Which destinations an event goes to.

use crate::config::Filter;
use crate::event::Event;

/// Does the filter take the event? Empty lists take everything.
pub fn takes(filter: &Filter, event: &Event) -> bool {
    let kind = Event::text(&event.kind);
    let tenant = event.tenant.as_ref().map(Event::text);
    let any = |patterns: &[String], text: Option<&str>| {
        patterns.is_empty()
            || text.is_some_and(|text| patterns.iter().any(|pattern| fits(pattern, text)))
    };
    any(&filter.kinds, Some(kind)) && any(&filter.tenants, tenant)
}

/// `*` stands for any text, also an empty one; everything else for itself.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or("");
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = rest.get(at + part.len()..).unwrap_or(""),
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn patterns() {
        for (pattern, text, expected) in [
            ("order.*", "order.created", true),
            ("order.*", "order", false),
            ("*", "", true),
            ("*.created", "order.created", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("ab*ba", "aba", false),
            ("order", "order", true),
            ("order", "orders", false),
            ("*rd*", "order", true),
        ] {
            assert_eq!(fits(pattern, text), expected, "{pattern} on {text}");
        }
    }
}
