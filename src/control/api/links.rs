//! Links in answers of servers behind `pods/proxy` and `services/proxy`
//! (`staging/src/k8s.io/apimachinery/pkg/util/proxy/transport.go`). A page does not know the prefix under which the apiserver
//! serves it, so links to paths of its server get the prefix. Pure.

/// Attributes that contain a link, by the element's name.
const LINKS: [(&str, &[&str]); 25] = [
    ("a", &["href"]),
    ("applet", &["codebase"]),
    ("area", &["href"]),
    ("audio", &["src"]),
    ("base", &["href"]),
    ("blockquote", &["cite"]),
    ("body", &["background"]),
    ("button", &["formaction"]),
    ("command", &["icon"]),
    ("del", &["cite"]),
    ("embed", &["src"]),
    ("form", &["action"]),
    ("frame", &["longdesc", "src"]),
    ("head", &["profile"]),
    ("html", &["manifest"]),
    ("iframe", &["longdesc", "src"]),
    ("img", &["longdesc", "src", "usemap"]),
    ("input", &["src", "usemap", "formaction"]),
    ("ins", &["cite"]),
    ("link", &["href"]),
    ("object", &["classid", "codebase", "data", "usemap"]),
    ("q", &["cite"]),
    ("script", &["src"]),
    ("source", &["src"]),
    ("video", &["poster", "src"]),
];

/// Elements whose content has no tags.
const RAW: [&str; 4] = ["script", "style", "textarea", "title"];

/// The prefix of a proxied server, and its address as its own links write it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prefix<'a> {
    /// The path under which the apiserver serves the server, without a slash at its end.
    pub(super) path: &'a str,
    /// The server's host and port.
    pub(super) host: &'a str,
}

impl Prefix<'_> {
    /// The link as the client must follow it; `None` if it stays: it is relative, leads to another host, or has the
    /// prefix.
    pub(super) fn link(&self, link: &str) -> Option<String> {
        let after_scheme = ["http://", "https://"]
            .iter()
            .find_map(|scheme| link.strip_prefix(scheme))
            .or_else(|| link.strip_prefix("//"));
        let path = match after_scheme {
            Some(rest) => {
                let path = rest.strip_prefix(self.host)?;
                if path.is_empty() { "/" } else { path }
            }
            None => link,
        };
        if !path.starts_with('/') {
            return None;
        }
        let below = path.strip_prefix(self.path);
        if below.is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?', '#'])) {
            return after_scheme.map(|_| path.to_owned());
        }
        Some(format!("{}{path}", self.path))
    }

    /// A page with its links as the client must follow them. All other bytes stay.
    pub(super) fn page(&self, page: &str) -> String {
        let mut out = String::with_capacity(page.len());
        let lower = page.to_ascii_lowercase();
        let mut rest = page;
        while let Some(start) = rest.find('<') {
            let (before, at) = rest.split_at(start);
            out.push_str(before);
            if let Some(comment) = at.strip_prefix("<!--") {
                let end = comment.find("-->").map_or(at.len(), |end| end + 7);
                out.push_str(&at[..end]);
                rest = &at[end..];
                continue;
            }
            let length = tag_length(at);
            let tag = &at[..length];
            let element = self.tag(tag, &mut out);
            rest = &at[length..];
            if let Some(raw) = RAW.iter().find(|raw| **raw == element) {
                let lower = &lower[page.len() - rest.len()..];
                let end = lower.find(&format!("</{raw}")).unwrap_or(rest.len());
                out.push_str(&rest[..end]);
                rest = &rest[end..];
            }
        }
        out.push_str(rest);
        out
    }

    /// Appends a tag to `out`, and returns the name of the element that it starts.
    fn tag(&self, tag: &str, out: &mut String) -> String {
        let name: String = tag[1..]
            .chars()
            .take_while(char::is_ascii_alphanumeric)
            .collect::<String>()
            .to_ascii_lowercase();
        let of = LINKS.iter().find(|(element, _)| *element == name);
        let Some((_, links)) = of else {
            out.push_str(tag);
            return name;
        };
        let mut rest = &tag[1 + name.len()..];
        out.push_str(&tag[..=name.len()]);
        while let Some(attribute) = Attribute::next(rest) {
            out.push_str(attribute.before);
            let is_link = links.contains(&attribute.name.to_ascii_lowercase().as_str());
            match self.link(attribute.value).filter(|_| is_link) {
                Some(link) => out.push_str(&link),
                None => out.push_str(attribute.value),
            }
            rest = attribute.after;
        }
        out.push_str(rest);
        name
    }
}

/// The bytes of a tag, up to and including its `>`, which quotes can contain.
fn tag_length(at: &str) -> usize {
    let starts = at[1..].starts_with(|c: char| c.is_ascii_alphabetic() || c == '/' || c == '!');
    if !starts {
        return 1;
    }
    let mut quote = None;
    for (i, byte) in at.bytes().enumerate() {
        match (quote, byte) {
            (None, b'>') => return i + 1,
            (None, b'"' | b'\'') => quote = Some(byte),
            (Some(open), byte) if open == byte => quote = None,
            _ => {}
        }
    }
    at.len()
}

/// An attribute with a value, and the text around the value.
struct Attribute<'a> {
    before: &'a str,
    name: &'a str,
    value: &'a str,
    after: &'a str,
}

impl<'a> Attribute<'a> {
    /// The next attribute with a value in the text of a tag.
    fn next(text: &'a str) -> Option<Attribute<'a>> {
        let equals = text.find('=')?;
        let name = text[..equals].trim_end();
        let name = &name[name
            .rfind(|c: char| c.is_ascii_whitespace() || c == '/')
            .map_or(0, |i| i + 1)..];
        let given = text[equals + 1..].trim_start();
        let start = text.len() - given.len();
        let (start, end) = match given.chars().next().filter(|c| ['"', '\''].contains(c)) {
            Some(quote) => {
                let length = given[1..].find(quote).unwrap_or(given.len() - 1);
                (start + 1, start + 1 + length)
            }
            None => {
                let length = given.find(|c: char| c.is_ascii_whitespace() || c == '>');
                (start, start + length.unwrap_or(given.len()))
            }
        };
        Some(Attribute {
            before: &text[..start],
            name,
            value: &text[start..end],
            after: &text[end..],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: Prefix = Prefix {
        path: "/p/proxy",
        host: "10.0.0.1:80",
    };

    #[test]
    fn links_to_paths_of_the_server_get_the_prefix() {
        for (link, expected) in [
            ("/a", Some("/p/proxy/a")),
            ("/", Some("/p/proxy/")),
            ("/a?b=/c#d", Some("/p/proxy/a?b=/c#d")),
            ("a", None),
            ("", None),
            ("#a", None),
            ("../a", None),
            ("http://10.0.0.1:80/a", Some("/p/proxy/a")),
            ("https://10.0.0.1:80", Some("/p/proxy/")),
            ("http://10.0.0.1:80/p/proxy/a", Some("/p/proxy/a")),
            ("//10.0.0.1:80/a", Some("/p/proxy/a")),
            ("http://10.0.0.1:8080/a", None),
            ("//other/a", None),
            ("mailto:a@example.com", None),
            ("/p/proxy/a", None),
            ("/p/proxy", None),
            ("/p/proxyother", Some("/p/proxy/p/proxyother")),
        ] {
            assert_eq!(PREFIX.link(link).as_deref(), expected, "{link}");
        }
    }

    /// With a search that reads the rest of the page for each element, this takes minutes.
    #[test]
    fn the_cost_of_a_page_is_linear() {
        let page = "<title></title>".repeat(280_000);
        assert!(PREFIX.page(&page) == page);
    }

    #[test]
    fn only_links_of_a_page_change() {
        for (page, expected) in [
            (
                r#"<a href="/rewriteme">test</a>"#,
                r#"<a href="/p/proxy/rewriteme">test</a>"#,
            ),
            (
                "<A class=x HREF='/a' title='/b'>/c</A>",
                "<A class=x HREF='/p/proxy/a' title='/b'>/c</A>",
            ),
            ("<img src=/a.png alt=/b>", "<img src=/p/proxy/a.png alt=/b>"),
            ("<br><p href=\"/a\">", "<br><p href=\"/a\">"),
            (
                "<input disabled src = \"/a>b\"/>é",
                "<input disabled src = \"/p/proxy/a>b\"/>é",
            ),
            (
                "<!-- <a href=\"/a\"> --><a href=\"/b\">",
                "<!-- <a href=\"/a\"> --><a href=\"/p/proxy/b\">",
            ),
            (
                "<script src=\"/a.js\">x = '<a href=\"/b\">';</script><a href=\"/c\">",
                "<script src=\"/p/proxy/a.js\">x = '<a href=\"/b\">';</script><a href=\"/p/proxy/c\">",
            ),
            ("1 < 2 <", "1 < 2 <"),
            ("<a href=\"/cut", "<a href=\"/p/proxy/cut"),
            ("<a href=", "<a href="),
            ("", ""),
        ] {
            assert_eq!(PREFIX.page(page), expected, "{page}");
        }
    }
}
