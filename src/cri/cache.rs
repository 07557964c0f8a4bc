//! A cache of what the runtime has answered, and what of a container's answer is kept.

use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use holdfast_core::pod::observed::{Container, ContainerState};

/// Maximum number of cached container details, and of cached sandbox networks. A node has fewer pods. If it has more,
/// the oldest entries are dropped, and the runtime is queried again.
const REMEMBERED: usize = 4096;

/// A cache that drops its oldest values when it is full.
#[derive(Debug)]
pub(super) struct Remembered<K, V> {
    values: HashMap<K, V>,
    /// The keys in order of insertion. Keys of removed values stay until their turn.
    order: VecDeque<K>,
}

impl<K, V> Default for Remembered<K, V> {
    fn default() -> Remembered<K, V> {
        Remembered {
            values: HashMap::new(),
            order: VecDeque::new(),
        }
    }
}

impl<K: Clone + Eq + Hash, V> Remembered<K, V> {
    pub(super) fn insert(&mut self, key: K, value: V) {
        if self.values.insert(key.clone(), value).is_none() {
            self.order.push_back(key);
        }
        while self.values.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.values.remove(&oldest);
        }
        if self.order.len() > 2 * REMEMBERED {
            let values = &self.values;
            self.order.retain(|key| values.contains_key(key));
        }
    }

    pub(super) fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.values.get(key)
    }

    pub(super) fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        self.values.remove(key);
    }

    /// Drops the values for which `keeps` is false.
    pub(super) fn retain(&mut self, keeps: impl Fn(&V) -> bool) {
        self.values.retain(|_, value| keeps(value));
    }
}

/// The cached details of a container in one state.
#[derive(Debug, Clone)]
pub(super) struct Detail {
    pub(super) container: Container,
    /// The details cannot change any more, so the runtime need not be queried again.
    pub(super) is_final: bool,
}

impl Detail {
    /// Returns the details to cache; `before` are the last ones seen. The runtime may learn only after an exit that the
    /// container ran out of memory: the exit and the OOM event come in any order. So details that were seen twice are
    /// final.
    pub(super) fn of(container: &Container, before: Option<&Detail>) -> Option<Detail> {
        let is_final = match container.state {
            ContainerState::Running => true,
            ContainerState::Exited => before.is_some_and(|before| before.container == *container),
            ContainerState::Created | ContainerState::Unknown => return None,
        };
        Some(Detail {
            container: container.clone(),
            is_final,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_entries_are_dropped_first() {
        let mut remembered = Remembered::default();
        let count = REMEMBERED + 10;
        (0..count).for_each(|n| remembered.insert(n, n));
        assert_eq!(remembered.values.len(), REMEMBERED);
        assert_eq!((remembered.get(&9), remembered.get(&10)), (None, Some(&10)));
        // A node that repeatedly creates and removes sandboxes does not grow.
        for n in count..20 * count {
            remembered.insert(n, n);
            remembered.remove(&n);
        }
        assert!(remembered.order.len() <= 2 * REMEMBERED);
        assert_eq!(remembered.get(&(count - 1)), Some(&(count - 1)));
    }
}
