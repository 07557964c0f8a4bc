//! The process contract of a plugin (CNI spec 1.1, section 2). Input: environment variables and a JSON
//! document on standard input. Output: one JSON document on standard output, and exit code 0 or 1.

use std::io::{Read as _, Write as _};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::cni::{Error, INPUT_LIMIT, Json, Owner, Success, VERSIONS, at_least, parse};
use crate::trace::Span;
use holdfast_net::netns;

/// The parameters of a call.
pub struct Call<'a> {
    /// The container's id.
    pub container: String,
    /// The path of its network namespace; may be empty on DEL.
    pub netns: String,
    /// The name of the interface in the container.
    pub ifname: String,
    /// `CNI_ARGS`.
    pub args: String,
    /// `CNI_PATH`.
    pub path: String,
    /// The network configuration.
    pub config: Json<'a>,
    /// The unparsed configuration, for delegated plugins.
    pub input: &'a [u8],
    /// The first sysctl that the configuration lists twice.
    pub repeated_sysctl: Option<String>,
    /// The `cniVersion` of the configuration.
    pub version: &'a str,
}

impl Call<'_> {
    /// The network's name.
    pub fn network(&self) -> Result<&str, Error> {
        self.config.text("name")
    }

    /// The owner of everything that this attachment has on the host.
    pub fn owner(&self) -> Result<Owner, Error> {
        Ok(Owner::new(self.network()?, &self.container, &self.ifname))
    }

    /// The result of the previous plugin; an error without one, since `plugin` works only in a chain.
    pub fn chained(&self, plugin: &str) -> Result<Success, Error> {
        self.previous()?.ok_or_else(|| {
            Error::config(format!(
                "{plugin} must be called as chained plugin: prevResult is missing"
            ))
        })
    }

    /// The result of the previous plugin, if there is one.
    pub fn previous(&self) -> Result<Option<Success>, Error> {
        self.config
            .get("prevResult")
            .map(|v| Success::parse(v, self.version))
            .transpose()
    }
}

/// A plugin. Verbs without an implementation succeed.
pub trait Plugin: Sync {
    /// The name by which the plugin is called.
    fn name(&self) -> &'static str;
    /// The protocol versions that the plugin supports.
    fn versions(&self) -> &'static [&'static str] {
        VERSIONS
    }
    /// ADD: attaches the container to the network.
    fn add(&self, call: &Call<'_>) -> Result<Success, Error>;
    /// DEL: best effort and idempotent.
    fn del(&self, call: &Call<'_>) -> Result<(), Error>;
    /// CHECK: verifies that the attachment is as ADD has left it.
    fn check(&self, call: &Call<'_>) -> Result<(), Error>;
    /// GC: `keep` lists the container ids and interfaces of valid attachments.
    fn gc(&self, _call: &Call<'_>, _keep: &[(String, String)]) -> Result<(), Error> {
        Ok(())
    }
    /// STATUS: verifies that the plugin can serve ADD.
    fn status(&self, _call: &Call<'_>) -> Result<(), Error> {
        Ok(())
    }
}

/// Runs a plugin with the environment of this process.
pub fn run(plugin: &dyn Plugin) -> ExitCode {
    let env = |name: &str| std::env::var(name).unwrap_or_default();
    if env("CNI_COMMAND").is_empty() {
        eprintln!(
            "holdfast CNI {} plugin {}\nCNI protocol versions supported: {}",
            plugin.name(),
            env!("CARGO_PKG_VERSION"),
            plugin.versions().join(", ")
        );
        return ExitCode::SUCCESS;
    }
    let mut version = "0.1.0".to_owned();
    let span = Span::begin(&env);
    let answered = call(plugin, &env, &mut version).map_err(|e| e.of(&env("CNI_COMMAND")));
    if let Err(error) = &answered {
        // If the runtime does not read the answer, the exit code still reports the failure.
        let _ = print(&error.json(&version));
    }
    if let Some(span) = span {
        span.export(plugin.name(), &env, answered.as_ref().err());
    }
    match answered {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Writes the answer of a call.
fn print(answer: &Value) -> Result<(), Error> {
    writeln!(std::io::stdout(), "{answer}")
        .map_err(|e| Error::new(Error::IO, format!("error writing to stdout: {e}")))
}

/// ADD. If the runtime cannot get the result, for instance because a result of version 0.2.0 needs an address, the attachment
/// is removed: a runtime that repeats a failed ADD expects no interface.
fn add(plugin: &dyn Plugin, call: &Call<'_>) -> Result<(), Error> {
    let success = plugin.add(call)?;
    let answered = success.json(call.version).and_then(|answer| print(&answer));
    if answered.is_err() {
        // Report only the first error; the runtime calls DEL for leftovers.
        let _ = plugin.del(call);
    }
    answered
}

/// The variables that a command requires (CNI spec 1.1, section 2).
fn needed(command: &str) -> Result<&'static [&'static str], Error> {
    match command {
        "ADD" | "CHECK" => Ok(&["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]),
        "DEL" => Ok(&["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"]),
        "GC" | "STATUS" => Ok(&["CNI_PATH"]),
        other => Err(Error::new(
            Error::ENVIRONMENT,
            format!("unknown CNI_COMMAND: {other}"),
        )),
    }
}

/// Reads the configuration from standard input.
fn input() -> Result<(Vec<u8>, Value, Option<String>), Error> {
    let mut input = Vec::new();
    std::io::stdin()
        .take(INPUT_LIMIT + 1)
        .read_to_end(&mut input)
        .map_err(|e| Error::new(Error::IO, format!("error reading from stdin: {e}")))?;
    let refused = |why: String| Error::new(Error::DECODE, why);
    if input.len() as u64 > INPUT_LIMIT {
        return Err(refused(format!(
            "the configuration is larger than {INPUT_LIMIT} bytes"
        )));
    }
    let (parsed, repeated_sysctl) =
        parse(&input).map_err(|e| refused(format!("the configuration is not JSON: {e}")))?;
    if !parsed.is_object() {
        return Err(refused("the configuration must be a JSON object".into()));
    }
    Ok((input, parsed, repeated_sysctl))
}

/// Validates the name of the network and the `cniVersion`, and returns the version.
fn checked<'a>(plugin: &dyn Plugin, config: Json<'a>) -> Result<&'a str, Error> {
    let name = config.text("name")?;
    if name.is_empty() {
        return Err(Error::config(
            "missing network name: set \"name\" in the network configuration",
        ));
    }
    check_id("network name", name).map_err(|e| Error::config(e.message))?;
    let given = config.text("cniVersion")?;
    let given = if given.is_empty() { "0.1.0" } else { given };
    if !plugin.versions().contains(&given) {
        let mut error = Error::new(Error::VERSION, "incompatible CNI versions");
        error.details = format!(
            "config is {given:?}, plugin supports {:?}",
            plugin.versions()
        );
        return Err(error);
    }
    Ok(given)
}

/// Checks that a configuration of this version allows the command.
fn allows(given: &str, command: &str) -> Result<(), Error> {
    let least = match command {
        "CHECK" => "0.4.0",
        "GC" | "STATUS" => "1.1.0",
        _ => "0.1.0",
    };
    if at_least(given, least) {
        return Ok(());
    }
    Err(Error::new(
        Error::VERSION,
        format!("config version {given} does not allow {command}: it needs at least {least}"),
    ))
}

fn call(
    plugin: &dyn Plugin,
    env: &dyn Fn(&str) -> String,
    version: &mut String,
) -> Result<(), Error> {
    let command = env("CNI_COMMAND");
    if command == "VERSION" {
        return print(&json!({"cniVersion": "1.1.0", "supportedVersions": plugin.versions()}));
    }
    let needed = needed(&command)?;
    let missing = needed.iter().copied().filter(|name| env(name).is_empty());
    let missing: Vec<&str> = missing.collect();
    if !missing.is_empty() {
        return Err(Error::new(
            Error::ENVIRONMENT,
            format!("required env variables [{}] missing", missing.join(",")),
        ));
    }
    let attaches = needed.contains(&"CNI_CONTAINERID");
    if attaches {
        check_id("CNI_CONTAINERID", &env("CNI_CONTAINERID"))?;
        check_ifname(&env("CNI_IFNAME"))?;
    }
    let (input, parsed, repeated_sysctl) = input()?;
    let config = Json(&parsed);
    let given = checked(plugin, config)?;
    given.clone_into(version);
    allows(given, &command)?;
    let call = Call {
        container: env("CNI_CONTAINERID"),
        netns: env("CNI_NETNS"),
        ifname: env("CNI_IFNAME"),
        args: env("CNI_ARGS"),
        path: env("CNI_PATH"),
        config,
        input: &input,
        repeated_sysctl,
        version: given,
    };
    let overridden = matches!(
        env("CNI_NETNS_OVERRIDE").to_lowercase().as_str(),
        "1" | "true"
    );
    if attaches && !call.netns.is_empty() && !overridden && netns::is_own(&call.netns) {
        return Err(Error::new(
            Error::NAMESPACE,
            format!(
                "plugin's netns and netns from CNI_NETNS should not be the same: {}",
                call.netns
            ),
        ));
    }
    match command.as_str() {
        "ADD" => add(plugin, &call),
        "DEL" => plugin.del(&call),
        "CHECK" => {
            if config.get("prevResult").is_none() {
                return Err(Error::config("CHECK needs prevResult in the configuration"));
            }
            plugin.check(&call)
        }
        "STATUS" => plugin.status(&call),
        // Without a list of valid attachments, GC removes nothing.
        _ => match keep(config)? {
            Some(keep) => plugin.gc(&call, &keep),
            None => Ok(()),
        },
    }
}

fn keep(config: Json<'_>) -> Result<Option<Vec<(String, String)>>, Error> {
    let key = ["cni.dev/valid-attachments", "cni.dev/attachments"]
        .into_iter()
        .find(|k| config.get(k).is_some());
    let Some(key) = key else { return Ok(None) };
    let list = config.list(key)?.iter().map(|item| {
        Ok((
            Json(item).text("containerID")?.to_owned(),
            Json(item).text("ifname")?.to_owned(),
        ))
    });
    list.collect::<Result<Vec<_>, Error>>().map(Some)
}

fn check_id(what: &str, id: &str) -> Result<(), Error> {
    let first = id.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    if first
        && id.len() <= 255
        && id
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
    {
        return Ok(());
    }
    Err(Error::new(
        Error::ENVIRONMENT,
        format!(
            "invalid characters in {what}: {:?}",
            id.chars().take(60).collect::<String>()
        ),
    ))
}

/// Checks that a name is valid for an interface.
pub fn check_ifname(name: &str) -> Result<(), Error> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > 15 {
        "it is longer than 15 bytes"
    } else if name == "." || name == ".." {
        "it is . or .."
    } else if name
        .chars()
        .any(|c| c == '/' || c == ':' || c.is_whitespace())
    {
        "it contains /, : or white space"
    } else {
        return Ok(());
    };
    Err(Error::new(
        Error::ENVIRONMENT,
        format!("invalid interface name {name:?}: {why}"),
    ))
}
