//! A minimal D-Bus client: connects, calls a method with strings, and reads a string, a boolean or an error (D-Bus
//! Specification 0.43). A D-Bus library would need an async runtime, which every plugin process would then start.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest message that is accepted, in bytes.
const LIMIT: usize = 1 << 16;
/// Maximum number of unrelated messages to skip while waiting for an answer.
const SKIPPED: usize = 1000;

const CALL: u8 = 1;
const RETURN: u8 = 2;
const ERROR: u8 = 3;

const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const REPLY_TO: u8 = 5;
const DESTINATION: u8 = 6;
const SIGNATURE: u8 = 8;

/// A method of an object on the bus.
#[derive(Debug, Clone, Copy)]
pub struct Method<'a> {
    /// The bus name of the service.
    pub destination: &'a str,
    /// The object path.
    pub path: &'a str,
    /// The interface.
    pub interface: &'a str,
    /// The name.
    pub name: &'a str,
}

/// The answer to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Success, with a body that this client does not read.
    Other,
    /// Success with a string.
    Text(String),
    /// Success with a boolean.
    Flag(bool),
    /// An error, with its text.
    Refused(String),
}

/// A message under construction.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }

    fn number(&mut self, number: u32) {
        self.align(4);
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(u32::try_from(text.len()).unwrap_or(0));
        self.0.extend_from_slice(text.as_bytes());
        self.0.push(0);
    }

    fn signature(&mut self, text: &str) {
        self.0.push(u8::try_from(text.len()).unwrap_or(0));
        self.0.extend_from_slice(text.as_bytes());
        self.0.push(0);
    }

    fn field(&mut self, code: u8, kind: &str, text: &str) {
        self.align(8);
        self.0.push(code);
        self.signature(kind);
        if kind == "g" {
            self.signature(text)
        } else {
            self.text(text)
        }
    }
}

fn call(method: Method<'_>, arguments: &[&str], serial: u32) -> Vec<u8> {
    let mut body = Writer::default();
    arguments.iter().for_each(|a| body.text(a));
    let mut fields = Writer::default();
    fields.field(PATH, "o", method.path);
    fields.field(INTERFACE, "s", method.interface);
    fields.field(MEMBER, "s", method.name);
    fields.field(DESTINATION, "s", method.destination);
    if !arguments.is_empty() {
        fields.field(SIGNATURE, "g", &"s".repeat(arguments.len()));
    }
    let size = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(0);
    let mut message = Writer(vec![b'l', CALL, 0, 1]);
    message.number(size(&body.0));
    message.number(serial);
    message.number(size(&fields.0));
    message.0.extend_from_slice(&fields.0);
    message.align(8);
    message.0.extend_from_slice(&body.0);
    message.0
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes
        .get(at..at + 4)?
        .try_into()
        .ok()
        .map(u32::from_le_bytes)
}

fn text(bytes: &[u8], at: usize) -> Option<String> {
    let length = number(bytes, at)? as usize;
    bytes
        .get(at + 4..at + 4 + length)
        .map(|b| String::from_utf8_lossy(b).into_owned())
}

/// Reads the serial of the answered call and the signature of the body from a header.
fn read_fields(fields: &[u8]) -> Option<(u32, String)> {
    let (mut at, mut reply_to, mut signature) = (0, 0, String::new());
    while at < fields.len() {
        let code = *fields.get(at)?;
        let kind_length = usize::from(*fields.get(at + 1)?);
        let kind = fields.get(at + 2..at + 2 + kind_length)?;
        let value = at + 3 + kind_length;
        at = match kind {
            b"u" => {
                let value = value.next_multiple_of(4);
                if code == REPLY_TO {
                    reply_to = number(fields, value)?;
                }
                value + 4
            }
            b"g" => {
                let length = usize::from(*fields.get(value)?);
                if code == SIGNATURE {
                    signature = String::from_utf8_lossy(fields.get(value + 1..value + 1 + length)?)
                        .into_owned();
                }
                value + length + 2
            }
            b"s" | b"o" => {
                let value = value.next_multiple_of(4);
                value + 4 + number(fields, value)? as usize + 1
            }
            _ => return None,
        }
        .next_multiple_of(8);
    }
    Some((reply_to, signature))
}

fn invalid_message() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the message bus sent a malformed reply",
    )
}

/// A connection to the system bus.
pub struct Bus {
    stream: UnixStream,
    serial: u32,
}

impl Bus {
    /// Connects to the system bus; `Ok(None)` if none is running.
    pub fn connect() -> io::Result<Option<Bus>> {
        let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS").unwrap_or_default();
        let path = address
            .split([',', ';'])
            .find_map(|part| part.strip_prefix("unix:path="))
            .unwrap_or("/run/dbus/system_bus_socket");
        let mut stream = match UnixStream::connect(path) {
            Err(error)
                if [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused]
                    .contains(&error.kind()) =>
            {
                return Ok(None);
            }
            stream => stream?,
        };
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        let user: String = nix::unistd::geteuid()
            .to_string()
            .bytes()
            .map(|b| format!("{b:02x}"))
            .collect();
        stream.write_all(format!("\0AUTH EXTERNAL {user}\r\n").as_bytes())?;
        let mut line = vec![];
        while !line.ends_with(b"\r\n") && line.len() < 512 {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            line.push(byte[0]);
        }
        if !line.starts_with(b"OK ") {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the message bus rejected the authentication of this process",
            ));
        }
        stream.write_all(b"BEGIN\r\n")?;
        let mut bus = Bus { stream, serial: 0 };
        let own = "org.freedesktop.DBus";
        bus.call(
            Method {
                destination: own,
                path: "/org/freedesktop/DBus",
                interface: own,
                name: "Hello",
            },
            &[],
        )?;
        Ok(Some(bus))
    }

    /// Calls a method and waits for the answer.
    pub fn call(&mut self, method: Method<'_>, arguments: &[&str]) -> io::Result<Answer> {
        self.serial += 1;
        self.stream
            .write_all(&call(method, arguments, self.serial))?;
        let deadline = Instant::now() + REPLY_TIMEOUT;
        for _ in 0..SKIPPED {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut fixed = [0; 16];
            self.stream.read_exact(&mut fixed)?;
            let (body, fields) = (
                number(&fixed, 4).ok_or_else(invalid_message)? as usize,
                number(&fixed, 12).ok_or_else(invalid_message)? as usize,
            );
            if fixed[0] != b'l' || body > LIMIT || fields > LIMIT {
                return Err(invalid_message());
            }
            let mut rest = vec![0; fields.next_multiple_of(8) + body];
            self.stream.read_exact(&mut rest)?;
            let (reply_to, signature) =
                read_fields(rest.get(..fields).ok_or_else(invalid_message)?)
                    .ok_or_else(invalid_message)?;
            // Skip signals and answers to other calls.
            if reply_to != self.serial || ![RETURN, ERROR].contains(&fixed[1]) {
                continue;
            }
            let body = rest
                .get(fields.next_multiple_of(8)..)
                .ok_or_else(invalid_message)?;
            return Ok(match (fixed[1], signature.as_bytes().first()) {
                (ERROR, Some(b's')) => Answer::Refused(text(body, 0).ok_or_else(invalid_message)?),
                (ERROR, _) => Answer::Refused("no reason was given".into()),
                (_, Some(b's')) => Answer::Text(text(body, 0).ok_or_else(invalid_message)?),
                (_, Some(b'b')) => Answer::Flag(number(body, 0).ok_or_else(invalid_message)? != 0),
                _ => Answer::Other,
            });
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the message bus sent {SKIPPED} messages but no reply"),
        ))
    }

    /// Whether a bus name has an owner.
    pub fn has(&mut self, name: &str) -> io::Result<bool> {
        let own = "org.freedesktop.DBus";
        let method = Method {
            destination: own,
            path: "/org/freedesktop/DBus",
            interface: own,
            name: "NameHasOwner",
        };
        Ok(self.call(method, &[name])? == Answer::Flag(true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        /// Any header is parsed or rejected. Well-formed fields are found among any others.
        #[test]
        fn any_header_is_decoded_or_rejected(bytes in vec(any::<u8>(), 0..200), reply_to in any::<u32>(), name in "[a-z.]{0,40}", flip in any::<(usize, u8)>()) {
            let _ = read_fields(&bytes);
            let _ = text(&bytes, 0);
            let mut fields = Writer::default();
            fields.field(DESTINATION, "s", &name);
            fields.align(8);
            fields.0.push(REPLY_TO);
            fields.signature("u");
            fields.align(4);
            fields.number(reply_to);
            fields.field(SIGNATURE, "g", "b");
            prop_assert_eq!(read_fields(&fields.0), Some((reply_to, "b".into())));
            let at = flip.0 % fields.0.len();
            fields.0[at] = flip.1;
            let _ = read_fields(&fields.0);
        }
    }

    #[test]
    fn a_bus_without_a_reply_is_abandoned() {
        let (stream, mut other) = UnixStream::pair().expect("a pair");
        let talk = std::thread::spawn(move || {
            // A signal without fields and body.
            let signal = [b'l', 4, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
            (0..)
                .take_while(|_| other.write_all(&signal).is_ok())
                .count()
        });
        let mut bus = Bus { stream, serial: 0 };
        let error = bus.has("a.b").expect_err("no answer");
        assert!(error.to_string().contains("no reply"), "{error}");
        drop(bus);
        assert!(talk.join().expect("ended") >= SKIPPED);
    }

    #[test]
    fn messages_are_aligned() {
        let method = Method {
            destination: "a.b",
            path: "/p",
            interface: "i.j",
            name: "M",
        };
        let bytes = call(method, &["x", "yz"], 7);
        let fields = number(&bytes, 12).expect("a length") as usize;
        assert_eq!(
            (bytes[0], number(&bytes, 4), number(&bytes, 8)),
            (b'l', Some(15), Some(7))
        );
        assert_eq!(read_fields(&bytes[16..16 + fields]), Some((0, "ss".into())));
        let body = 16 + fields.next_multiple_of(8);
        assert_eq!(
            (
                text(&bytes, body).as_deref(),
                text(&bytes, body + 8).as_deref(),
                bytes.len()
            ),
            (Some("x"), Some("yz"), body + 15)
        );
        for cut in 0..fields {
            let _ = read_fields(&bytes[16..16 + cut]);
        }
    }
}
