//! Thousands of services.

use holdfast_core::network::Family;
use holdfast_net::netlink::Message;
use holdfast_net::nft::{self, Nft, Table};
use serde_json::json;

use crate::world::{World, call, settings};

/// More operations than one transaction has while empty tables are filled.
const SERVICES: usize = 4000;
const ENDPOINTS: usize = 10;

fn set_all(world: &mut World) {
    for number in 0..SERVICES {
        let address = format!("10.96.{}.{}", 1 + number / 250, 1 + number % 250);
        let service = json!({
            "metadata": {"namespace": "many", "name": format!("s{number}")},
            "spec": {"clusterIP": address, "ports": [{"name": "http", "port": 80}]},
        });
        let endpoints: Vec<_> = (0..ENDPOINTS)
            .map(|n| {
                let at = number * ENDPOINTS + n;
                let address = format!("10.245.{}.{}", at / 250, 1 + at % 250);
                json!({"addresses": [address], "nodeName": "there"})
            })
            .collect();
        let slice = json!({
            "metadata": {"name": format!("s{number}-1")}, "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8080}], "endpoints": endpoints,
        });
        let service = serde_json::from_value(service).unwrap();
        let slices = [std::sync::Arc::new(serde_json::from_value(slice).unwrap())];
        let name = format!("s{number}");
        world
            .plane()
            .set_service("many", &name, Some(&service), &slices);
    }
}

/// Makes the next audit read the whole table.
fn change_foreign(world: &World) {
    let foreign = Table {
        family: nft::Family::V4,
        name: "foreign",
    };
    let messages: Vec<Message> = vec![foreign.create()];
    world
        .node
        .inside(|| Nft::open().unwrap().commit(messages).unwrap());
}

#[test]
fn thousands_of_services_are_filled_in_and_replaced() {
    let Some(mut world) = World::new(Family::V4) else {
        return;
    };
    let to = world.to("service", 20, 80);
    // The first process fills empty tables, the second one replaces them.
    for _ in 0..2 {
        set_all(&mut world);
        assert!(world.set_up(json!({}), &[2]).is_full);
        assert_eq!(call(&world.client, to).unwrap().endpoint, 2);
        change_foreign(&world);
        assert_eq!(world.audit(), [""; 0]);
        assert!(world.set_up(json!({}), &[3]).messages <= 6);
        assert_eq!(call(&world.client, to).unwrap().endpoint, 3);
        world.open(settings());
    }
}
