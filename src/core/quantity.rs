//! Kubernetes quantities: exact arithmetic in billionths, and canonical formatting.
//!
//! The rules are those of apimachinery's `resource.Quantity`: a decimal number with a binary suffix (`Ki` to `Ei`), a
//! decimal suffix (`n`, `u`, `m`, ``, `k` to `E`) or an exponent. Fractions of a billionth are rounded up.

use std::fmt;
use std::str::FromStr;

const NANO: i128 = 1_000_000_000;
/// Maximum magnitude in billionths: 2^63-1 units. Larger numbers are capped (`ParseQuantity` in
/// `staging/src/k8s.io/apimachinery/pkg/api/resource/quantity.go`).
const MAX_NANO: i128 = i64::MAX as i128 * NANO;

/// An exact amount in billionths of a unit. Comparison uses only the amount; the suffix family of the parsed text is
/// kept for formatting.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quantity {
    nanos: i128,
    binary: bool,
}

/// The text is not a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
)]
pub struct BadQuantity;

impl Quantity {
    /// Zero.
    pub const ZERO: Quantity = Quantity {
        nanos: 0,
        binary: false,
    };

    /// From whole units.
    #[must_use]
    pub fn from_units(units: i64) -> Quantity {
        Quantity {
            nanos: i128::from(units).saturating_mul(NANO),
            binary: false,
        }
    }

    /// From bytes; formatted with binary suffixes.
    #[must_use]
    pub fn from_bytes(bytes: u64) -> Quantity {
        Quantity {
            nanos: i128::from(bytes).saturating_mul(NANO),
            binary: true,
        }
    }

    /// Thousandths, rounded up, saturating.
    #[must_use]
    pub fn milli(self) -> i64 {
        saturate(div_up(self.nanos, NANO / 1000))
    }

    /// Whole units, rounded up, saturating.
    #[must_use]
    pub fn units(self) -> i64 {
        saturate(div_up(self.nanos, NANO))
    }

    /// Whether the amount is zero.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.nanos == 0
    }
}

fn div_up(value: i128, by: i128) -> i128 {
    value
        .div_euclid(by)
        .saturating_add(i128::from(value.rem_euclid(by) != 0))
}

fn saturate(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl std::ops::Add for Quantity {
    type Output = Quantity;
    fn add(self, other: Quantity) -> Quantity {
        Quantity {
            nanos: self.nanos.saturating_add(other.nanos),
            binary: self.binary || other.binary,
        }
    }
}

impl std::ops::Sub for Quantity {
    type Output = Quantity;
    fn sub(self, other: Quantity) -> Quantity {
        Quantity {
            nanos: self.nanos.saturating_sub(other.nanos),
            binary: self.binary || other.binary,
        }
    }
}

impl std::iter::Sum for Quantity {
    fn sum<I: Iterator<Item = Quantity>>(items: I) -> Quantity {
        items.fold(Quantity::ZERO, |a, b| a + b)
    }
}

impl FromStr for Quantity {
    type Err = BadQuantity;

    fn from_str(text: &str) -> Result<Quantity, BadQuantity> {
        let split = text
            .find(|c: char| !c.is_ascii_digit() && !"+-.".contains(c))
            .unwrap_or(text.len());
        let (number, suffix) = text.split_at(split);
        let (negative, digits) = match number.as_bytes().first() {
            Some(b'-') => (true, &number[1..]),
            Some(b'+') => (false, &number[1..]),
            _ => (false, number),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let numeric = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if !numeric(whole) || !numeric(fraction) || (whole.is_empty() && fraction.is_empty()) {
            return Err(BadQuantity);
        }
        let (factor, divisor, binary): (i128, i128, bool) = match suffix {
            "" => (NANO, 1, false),
            "n" => (1, 1, false),
            "u" => (1000, 1, false),
            "m" => (1_000_000, 1, false),
            "k" => (NANO * 1000, 1, false),
            "M" => (NANO * 1_000_000, 1, false),
            "G" => (NANO * NANO, 1, false),
            "T" => (NANO * NANO * 1000, 1, false),
            "P" => (NANO * NANO * 1_000_000, 1, false),
            "E" => (NANO * NANO * NANO, 1, false),
            "Ki" => (NANO << 10, 1, true),
            "Mi" => (NANO << 20, 1, true),
            "Gi" => (NANO << 30, 1, true),
            "Ti" => (NANO << 40, 1, true),
            "Pi" => (NANO << 50, 1, true),
            "Ei" => (NANO << 60, 1, true),
            other => {
                let exponent = other
                    .strip_prefix(['e', 'E'])
                    .and_then(|e| e.parse::<i32>().ok())
                    .ok_or(BadQuantity)?;
                let power = 10i128
                    .checked_pow(exponent.unsigned_abs())
                    .unwrap_or(i128::MAX);
                match exponent >= 0 {
                    true => (NANO.saturating_mul(power), 1, false),
                    false => (NANO, power, false),
                }
            }
        };
        let (mut numerator, mut places) = fraction_of(fraction);
        let mut of_fraction = factor;
        while places % 10 == 0 && of_fraction % 10 == 0 {
            (places, of_fraction) = (places / 10, of_fraction / 10);
        }
        while numerator.checked_mul(of_fraction).is_none() && places > 1 {
            (numerator, places) = (div_up(numerator, 10), places / 10);
        }
        let whole = div_up(integer(whole).saturating_mul(factor), divisor);
        let fraction = div_up(
            numerator.saturating_mul(of_fraction),
            places.saturating_mul(divisor),
        );
        let magnitude = whole.saturating_add(fraction).min(MAX_NANO);
        Ok(Quantity {
            nanos: if negative {
                magnitude.saturating_neg()
            } else {
                magnitude
            },
            binary,
        })
    }
}

/// Parses decimal digits; saturates.
fn integer(digits: &str) -> i128 {
    match digits.is_empty() {
        true => 0,
        false => digits.parse().unwrap_or(i128::MAX),
    }
}

/// The fractional digits as numerator and power of ten. Digits after the twentieth round up.
fn fraction_of(digits: &str) -> (i128, i128) {
    const DIGITS: usize = 20;
    let (read, rest) = digits.split_at(digits.len().min(DIGITS));
    let more = i128::from(rest.bytes().any(|digit| digit != b'0'));
    let places = read
        .bytes()
        .fold(1i128, |power, _| power.saturating_mul(10));
    (integer(read).saturating_add(more), places)
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        if self.binary && self.nanos % NANO == 0 {
            let units = self.nanos / NANO;
            let mut steps = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].into_iter();
            let (mut value, mut suffix) = (units, "");
            while value % 1024 == 0
                && let Some(step) = steps.next()
            {
                (value, suffix) = (value / 1024, step);
            }
            return write!(f, "{value}{suffix}");
        }
        let mut steps = ["u", "m", "", "k", "M", "G", "T", "P", "E"].into_iter();
        let (mut value, mut suffix) = (self.nanos, "n");
        while value % 1000 == 0
            && let Some(step) = steps.next()
        {
            (value, suffix) = (value / 1000, step);
        }
        write!(f, "{value}{suffix}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantities_are_parsed_and_printed_canonically() {
        let cases = [
            ("0", "0"),
            ("100m", "100m"),
            ("0.1", "100m"),
            ("1000m", "1"),
            ("1.5Gi", "1536Mi"),
            ("1024Ki", "1Mi"),
            ("1k", "1k"),
            ("1e3", "1k"),
            ("1E", "1E"),
            ("12e-3", "12m"),
            ("-5", "-5"),
            ("9223372036854775807", "9223372036854775807"),
            ("1e30", "9223372036854775807"),
            ("-1e30", "-9223372036854775807"),
            ("1e999", "9223372036854775807"),
            (
                "99999999999999999999999999999999999999999",
                "9223372036854775807",
            ),
            ("16Ei", "9223372036854775807"),
            ("1e-999", "1n"),
            ("0e999", "0"),
            ("0.0000001", "100n"),
            ("0.12345678901234E", "123456789012340k"),
            ("0.1000000000000000000000000000001", "100000001n"),
            ("0.0000000001", "1n"),
            ("128974848", "128974848"),
        ];
        for (text, canonical) in cases {
            assert_eq!(
                text.parse::<Quantity>().expect(text).to_string(),
                canonical,
                "{text}"
            );
        }
        for bad in ["", "x", "1x", "--1", "1.2.3", "1ki", ".", "1e", "1 "] {
            assert!(bad.parse::<Quantity>().is_err(), "{bad}");
        }
        assert_eq!(
            "1500u".parse::<Quantity>().expect("small").milli(),
            2,
            "rounds up"
        );
    }

    proptest! {
        #[test]
        fn printing_and_parsing_agree(nanos in -1_000_000_000_000_000_000i64..1_000_000_000_000_000_000, binary: bool) {
            let quantity = Quantity { nanos: i128::from(nanos), binary };
            let again: Quantity = quantity.to_string().parse().expect("the printed quantity can be parsed");
            prop_assert_eq!(again, quantity);
        }

        #[test]
        fn every_parsed_quantity_round_trips(text in "[-+]?[0-9]{0,45}[.]?[0-9]{0,45}([eE][-+]?[0-9]{0,4}|[numkMGTPE]|[KMGTPE]i)?") {
            if let Ok(quantity) = text.parse::<Quantity>() {
                prop_assert_eq!(quantity.to_string().parse(), Ok(quantity));
                let _ = (quantity.milli(), quantity.units(), quantity + quantity, quantity - quantity - quantity);
            }
        }
    }
}
