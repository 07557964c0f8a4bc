# `make help` lists the targets.
CARGO ?= cargo
# `make up` runs what builds in minutes. What stays, and what is measured, has the profile `dist`.
QUICK = target/quick/holdfast
DIST = target/dist/holdfast

.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

deps: ## Install the distribution's packages for running (containerd, runc)
	@sh tests/support/install.sh containerd runc

test-deps: ## Install the additional packages for make test
	@sh tests/support/install.sh containerd runc busybox-static iproute2 nftables iptables containernetworking-plugins podman firewalld dbus kubectl docker-registry e2fsprogs xfsprogs

test-all-deps: test-deps ## Install the additional packages for make test-all (virtual machines)
	@sh tests/support/install.sh qemu-system-x86 mmdebstrap kmod patchelf secilc

build: ## Build both programs quickly, into target/quick
	$(CARGO) build --profile quick --locked -p holdfast --bin holdfast -p holdfast-cni --bin holdfast-cni

# The CNI plugins of a package are static, because finding shared libraries would take a third of a plugin's start. The flag
# is passed to the program alone.
CNI = --locked -p holdfast-cni --bin holdfast-cni -- -C target-feature=+crt-static
dist: cni ## Build both programs for packages, make install and make bench, into target/dist
	$(CARGO) build --profile dist --locked -p holdfast --bin holdfast

cni: ## Build the CNI plugins as one static binary, into target/dist
	$(CARGO) rustc --profile dist $(CNI)

up: deps build ## Start a cluster on this machine
	@$(QUICK) up

down: ## Stop the cluster and remove the leftovers of its pods
	@if [ -x $(QUICK) ]; then $(QUICK) down; else echo "$(QUICK) is not built, so no cluster is running"; fi

# Directories of `make install`; packagers set DESTDIR.
PREFIX ?= /usr/local
UNITS = $(PREFIX)/lib/systemd/system
SHARE = $(PREFIX)/share/holdfast
UNIT_FILES = holdfast-agent.service holdfast-proxy.service holdfast-dhcp.service holdfast-dhcp.socket
install: ## Install the programs of make dist and their units (PREFIX, DESTDIR)
	@test -x $(DIST) || { echo "$(DIST) is not built; run make dist first"; exit 1; }
	install -D -m 755 $(DIST) $(DESTDIR)$(PREFIX)/bin/holdfast
	install -D -m 755 $(dir $(DIST))holdfast-cni $(DESTDIR)$(PREFIX)/bin/holdfast-cni
	for unit in $(UNIT_FILES); do install -D -m 644 systemd/$$unit $(DESTDIR)$(UNITS)/$$unit && sed -i 's|/usr/local/bin/|$(PREFIX)/bin/|' $(DESTDIR)$(UNITS)/$$unit || exit 1; done
	install -D -m 644 systemd/20-holdfast.conf $(DESTDIR)$(SHARE)/20-holdfast.conf
	sed -i 's|/usr/local/bin/|$(PREFIX)/bin/|' $(DESTDIR)$(SHARE)/20-holdfast.conf
	install -D -m 644 config/10-holdfast.conflist $(DESTDIR)$(SHARE)/10-holdfast.conflist
	test -e $(DESTDIR)/etc/holdfast/config.yaml || install -D -m 644 config/agent.yaml $(DESTDIR)/etc/holdfast/config.yaml
	test -e $(DESTDIR)/etc/holdfast/proxy.yaml || install -D -m 644 config/proxy.yaml $(DESTDIR)/etc/holdfast/proxy.yaml

# The drop-in that makes the kubelet's unit run Holdfast. Without the binary, that unit could not start.
DROP_IN = /etc/systemd/system/kubelet.service.d/20-holdfast.conf
uninstall: ## Remove the files of `make install`; /etc/holdfast and the data stay
	@test ! -e $(DESTDIR)$(DROP_IN) || { echo "$(DESTDIR)$(DROP_IN) makes kubelet.service run holdfast; go back to the kubelet first: rm $(DESTDIR)$(DROP_IN) && systemctl daemon-reload && systemctl restart kubelet" >&2; exit 1; }
	rm -f $(DESTDIR)$(PREFIX)/bin/holdfast $(DESTDIR)$(PREFIX)/bin/holdfast-cni
	for unit in $(UNIT_FILES); do rm -f $(DESTDIR)$(UNITS)/$$unit; done
	rm -rf $(DESTDIR)$(SHARE)

# Newer containerds for the tests, unpacked next to the installed one. Without the archive, only the installed one is tested.
RUNTIMES = target/containerd
runtimes: test-all-deps
	@for suite in trixie sid; do sh tests/support/fetch-package.sh $$suite containerd $(RUNTIMES)/$$suite usr/bin/containerd || echo "fetching containerd of $$suite failed; its tests are skipped, or fail with CI=true"; done
	@sh tests/support/fetch-runc.sh $(RUNTIMES)/runc || echo "fetching runc of sid failed; its tests are skipped, or fail with CI=true"

# A virtual machine's kernel and disk, for features that this machine may lack: cgroup v2 with systemd, NFS, quotas.
MACHINE = target/machine
machine: test-all-deps
	@sh tests/support/fetch-kernel.sh $(MACHINE)
	@sh tests/support/make-node.sh $(MACHINE) $(MACHINE)/node.img

# A newer kubectl next to the installed one.
KUBECTLS = target/kubectl
kubectls:
	@sh tests/support/fetch-package.sh sid kubectl $(KUBECTLS)/sid usr/bin/kubectl || echo "fetching kubectl of sid failed; its tests are skipped, or fail with CI=true"

# `--workspace` selects the same features of dependencies everywhere, so nothing is built twice.
# With ALL=1, tests find what test-all-deps and the three targets above provide. Without, they report what they leave out.
FETCHED = HOLDFAST_RUNTIMES=$(CURDIR)/$(RUNTIMES) HOLDFAST_KUBECTLS=$(CURDIR)/$(KUBECTLS) HOLDFAST_MACHINE=$(CURDIR)/$(MACHINE)
# Tests mostly wait, so three groups of suites run beside each other: clusters, the plugins' black-box tests, and the others. Cargo has
# no argument for all suites but some.
CLUSTERS = --workspace --test cluster
# `walls` is beside `blackbox` for what it depends on: for `blackbox` alone, cargo compiles the libraries of procedural macros with
# other flags, and with them the plugins once more.
PLUGINS = --workspace --test blackbox --test walls
OTHERS = --workspace --lib --bins --test c[!l]* --test [!bcw]*
TEST = $(CARGO) test --locked --no-fail-fast $(FLAGS)
THREADS = 4
# Beside the clusters, 200 seeds without optimisation would take longer than these.
test: export HOLDFAST_SEEDS ?= 50
test: test-deps $(if $(ALL),runtimes kubectls machine) ## Run the tests (ONLY='--workspace --test cluster node::' for one suite)
	@$(TEST) $(or $(ONLY),--workspace) --no-run
	@$(if $(ALL),$(FETCHED)) tests/support/count.sh $(if $(ONLY),'$(TEST) $(ONLY) -- --test-threads=$(THREADS)','$(TEST) $(CLUSTERS) -- --test-threads=8' '$(TEST) $(PLUGINS) -- --test-threads=$(THREADS)' '$(TEST) $(OTHERS) -- --test-threads=$(THREADS)')

# The same as .ci/run with larger numbers. It takes at most 90 minutes.
test-all: ## Run all tests, also in virtual machines and with other containerds, 20,000 seeds and 200 rounds
	SEEDS=20000 ROUNDS=200 FUZZ_SECONDS=20 HOLDFAST_CYCLES=19 .ci/run

check: licences ## Check format, lints and, with cargo-deny, licences and sources
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

licences:
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny --offline check licenses bans sources; else echo "cargo-deny is not installed; licences are not checked"; fi

proto: ## Generate the code of changed protocol files
	HOLDFAST_UPDATE=1 $(CARGO) test --locked --workspace --test walls generated

# With opt-level 1, a seed takes less than half the time.
sim: ## Run many seeds of the simulation (SEEDS=5000)
	HOLDFAST_SEEDS=$(or $(SEEDS),5000) CARGO_PROFILE_DEV_OPT_LEVEL=1 $(CARGO) test --locked --workspace --test sim $(FLAGS)

# Property tests of decoders besides the API, whose names begin with any_: frames, selectors, patches, and messages of D-Bus, netlink and DHCP servers.
READERS = any_ selector::
fuzz: ## Fuzz the bundled API and all decoders (SECONDS=60 for each kind)
	HOLDFAST_FUZZ_SECONDS=$(or $(SECONDS),60) HOLDFAST_SEED=$(or $(SEED),1) $(CARGO) test --locked --workspace --test control fuzz
	PROPTEST_CASES=$(or $(SECONDS),60)0000 $(CARGO) test --locked --workspace --lib -- $(READERS)

# A release, because the limits are absolute.
soak: test-deps ## Run hostile clients while pods start and stop; needs an otherwise idle machine (MINUTES=10)
	$(CARGO) rustc --release $(CNI)
	HOLDFAST_SOAK_MINUTES=$(or $(MINUTES),10) $(CARGO) test --release --locked --test soak -- --nocapture

rounds: test-deps ## Run random pods and volumes with kills, full disks and removed devices (ROUNDS=1000 SEED=1)
	$(CARGO) build --locked -p holdfast-cni
	HOLDFAST_ROUNDS=$(or $(ROUNDS),1000) HOLDFAST_SEED=$(or $(SEED),1) $(CARGO) test --locked --workspace --test cluster canary::rounds -- --nocapture

power: machine ## Shut down a virtual node or cut its power, repeatedly (CYCLES=19)
	$(CARGO) build --locked -p holdfast-cni
	HOLDFAST_CYCLES=$(or $(CYCLES),19) HOLDFAST_MACHINE=$(CURDIR)/$(MACHINE) $(CARGO) test --locked --workspace --test machines power -- --nocapture

bench: test-deps cni ## Compare the agent with the bare runtime (ratios for BENCHMARKS.md)
	$(CARGO) bench --profile dist --locked --bench pods

bench-dns: ## Measure answers per second, latency and memory of the DNS server
	$(CARGO) bench --workspace --locked --bench dns

bench-controllers: ## Measure the processor time of the bundled control plane with thousands of pods
	$(CARGO) bench --workspace --locked --bench controllers

bench-services: ## Measure the data plane of services: set-up, one change, memory and connections
	$(CARGO) bench --workspace --locked --bench services

# Cargo builds the program for its benchmark too, without the flag: in target/release, so the measured one stays.
bench-cni: test-deps cni ## Compare the CNI plugins with the distribution's
	HOLDFAST_CNI=$(CURDIR)/$(dir $(DIST))holdfast-cni $(CARGO) bench --locked -p holdfast-cni --bench cni

.PHONY: proto licences help install uninstall dist cni runtimes kubectls machine sim fuzz soak rounds power deps test-deps test-all-deps build up down test test-all check bench bench-cni bench-controllers bench-services bench-dns
