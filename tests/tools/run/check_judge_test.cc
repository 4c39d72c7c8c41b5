// Which host or link a check of hosts blames: planted results of every kind, over 2 to 9 hosts, and none where all is
// well but noisy.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include "tools/run/check/check_judge.h"

using namespace cairn::tools;
using Kind = CheckFinding::Kind;

namespace {

std::vector<std::string> names_of(int64_t hosts) {
  std::vector<std::string> out;
  for (int64_t k = 0; k < hosts; ++k) out.push_back("h" + std::to_string(k));
  return out;
}

HostFigures well_alone() {
  return {.matmul_gflops = 100, .copy_gb_s = 8, .write_mb_s = 500, .digest = "d", .failed = {}};
}
PairFigures well_pair(int64_t a, int64_t b) {
  return {.a = a, .b = b, .gb_s = 1, .trip_us = 100, .trips = 200, .failed = {}};
}

/// Hosts and links of which some are not well.
struct Planted {
  std::function<void(int64_t host, HostFigures&)> host = [](int64_t, HostFigures&) {};
  std::function<void(PairFigures&)> pair = [](PairFigures&) {};
};

std::vector<CheckFinding> check(int64_t hosts, const Planted& planted, int64_t* rounds = nullptr) {
  CheckJudge judge(names_of(hosts));
  for (CheckJudge::Round round = judge.next(); !round.empty(); round = judge.next()) {
    std::set<int64_t> busy;
    for (const int64_t host : round.alone) {
      HostFigures figures = well_alone();
      planted.host(host, figures);
      judge.add_host(host, figures);
    }
    if (round.reach) {
      for (int64_t a = 0; a < hosts; ++a) {
        for (int64_t b = a + 1; b < hosts; ++b) {
          PairFigures figures{.a = a, .b = b, .reach = true, .failed = {}};
          planted.pair(figures);
          judge.add_pair(figures);
        }
      }
    }
    for (const auto& [a, b] : round.pairs) {
      CHECK(busy.insert(a).second);
      CHECK(busy.insert(b).second);
      PairFigures figures = well_pair(a, b);
      planted.pair(figures);
      judge.add_pair(figures);
    }
    REQUIRE(judge.rounds() <= 1 + kPairRounds);
  }
  if (rounds != nullptr) *rounds = judge.rounds();
  return judge.findings();
}

bool touches(const PairFigures& pair, int64_t host) { return pair.a == host || pair.b == host; }

}  // namespace

TEST_SUITE("tools/run/check_judge") {
  TEST_CASE("hosts that are all well are measured once alone and once with a partner") {
    for (int64_t hosts = 2; hosts <= 9; ++hosts) {
      CAPTURE(hosts);
      int64_t rounds = 0;
      CHECK(check(hosts, {}, &rounds).empty());
      CHECK(rounds == (hosts == 3 ? 4 : hosts % 2 == 0 ? 2 : 3));
    }
  }

  TEST_CASE("a host that is ill alone is blamed, whichever and whatever it is") {
    const std::vector<std::pair<Kind, std::function<void(HostFigures&)>>> ills = {
        {Kind::kHost, [](HostFigures& one) { one = {.digest = {}, .failed = "write: Input/output error"}; }},
        {Kind::kHost, [](HostFigures& one) { one.digest = "other"; }},
        {Kind::kSlowHost, [](HostFigures& one) { one.matmul_gflops = 30; }},
        {Kind::kSlowHost, [](HostFigures& one) { one.copy_gb_s = 2; }},
        {Kind::kSlowHost, [](HostFigures& one) { one.write_mb_s = 90; }}};
    for (int64_t hosts = 2; hosts <= 9; ++hosts) {
      for (int64_t ill = 0; ill < hosts; ++ill) {
        for (size_t k = 0; k < ills.size(); ++k) {
          if (hosts == 2 && k == 1) continue;  // which of two computes wrongly cannot be known
          CAPTURE(hosts);
          CAPTURE(ill);
          CAPTURE(k);
          Planted planted;
          planted.host = [&](int64_t host, HostFigures& one) {
            if (host == ill) ills[k].second(one);
          };
          const std::vector<CheckFinding> found = check(hosts, planted);
          REQUIRE(found.size() == 1);
          CHECK(found[0].kind == ills[k].first);
          CHECK(found[0].a == ill);
          CHECK(!found[0].why.empty());
        }
      }
    }
  }

  TEST_CASE("a GPU is told as slow after three rounds alone, and as broken at once, whatever the others are") {
    const auto gpus = [](double tflops, int64_t ecc) {
      HostGpus out;
      for (int64_t k = 0; k < 2; ++k) {
        GpuFigures& gpu = out.gpus.emplace_back();
        gpu.health.index = k;
        gpu.health.pci = "0000:0" + std::to_string(k) + ":00.0";
        gpu.product_tflops = k == 1 ? tflops : 600;
        gpu.health.ecc_uncorrected = k == 1 ? ecc : 0;
      }
      return out;
    };
    for (int64_t hosts = 2; hosts <= 5; ++hosts) {
      for (int64_t ill = 0; ill < hosts; ++ill) {
        for (const int64_t times : {0, 1, 2, 3}) {
          CAPTURE(hosts);
          CAPTURE(ill);
          CAPTURE(times);
          int64_t measured = 0, rounds = 0;
          Planted planted;
          planted.host = [&](int64_t host, HostFigures& one) {
            one.gpus = gpus(host == ill && measured++ < times ? 300 : 600, 0);
          };
          const std::vector<CheckFinding> found = check(hosts, planted, &rounds);
          REQUIRE(found.size() == (times == 3 ? 1 : 0));
          CHECK(measured == std::min<int64_t>(times + 1, 3));
          if (times < 3) continue;
          CHECK(found[0].kind == Kind::kSlowGpu);
          CHECK(found[0].a == ill);
          CHECK(found[0].gpu.pci == "0000:01:00.0");
        }
        Planted planted;  // all but one
        planted.host = [&](int64_t host, HostFigures& one) { one.gpus = gpus(600, host == ill ? 0 : 3); };
        int64_t rounds = 0;
        const std::vector<CheckFinding> found = check(hosts, planted, &rounds);
        REQUIRE(std::ssize(found) == hosts - 1);
        for (const CheckFinding& one : found) {
          CHECK(one.kind == Kind::kGpu);
          CHECK(one.a != ill);
          CHECK(one.why.find("GPU 1 (0000:01:00.0) is broken: 3 uncorrected") == 0);
        }
      }
    }
  }

  TEST_CASE("a host whose network is ill is blamed, whichever and whatever it is") {
    const std::vector<std::pair<Kind, std::function<void(PairFigures&)>>> ills = {
        {Kind::kHost,
         [](PairFigures& one) {
           if (!one.reach) one.failed = "timeout";
         }},
        {Kind::kHost, [](PairFigures& one) { one.failed = "cannot be reached"; }},
        {Kind::kHost,
         [](PairFigures& one) {
           if (!one.reach) one.stalls = one.resent = 20;
         }},
        {Kind::kSlowHost,
         [](PairFigures& one) {
           if (!one.reach) one.gb_s = 0.001;
         }},
        {Kind::kSlowHost, [](PairFigures& one) {
           if (!one.reach) one.trip_us = 100'000;
         }}};
    for (int64_t hosts = 3; hosts <= 9; ++hosts) {
      for (int64_t ill = 0; ill < hosts; ++ill) {
        for (size_t k = 0; k < ills.size(); ++k) {
          CAPTURE(hosts);
          CAPTURE(ill);
          CAPTURE(k);
          Planted planted;
          planted.pair = [&](PairFigures& pair) {
            if (touches(pair, ill)) ills[k].second(pair);
          };
          const std::vector<CheckFinding> found = check(hosts, planted);
          REQUIRE(found.size() == 1);
          CHECK(found[0].kind == ills[k].first);
          CHECK(found[0].a == ill);
          CHECK(found[0].why.starts_with("its network: with h"));
        }
      }
    }
  }

  TEST_CASE("a link that is cut is told, whichever it is, and blames neither of its hosts") {
    for (int64_t hosts = 3; hosts <= 9; ++hosts) {
      for (int64_t a = 0; a < hosts; ++a) {
        for (int64_t b = a + 1; b < hosts; ++b) {
          CAPTURE(hosts);
          CAPTURE(a);
          CAPTURE(b);
          Planted planted;
          planted.pair = [&](PairFigures& pair) {
            if (touches(pair, a) && touches(pair, b)) pair.failed = "cannot be reached";
          };
          const std::vector<CheckFinding> found = check(hosts, planted);
          REQUIRE(found.size() == 1);
          CHECK(found[0] == CheckFinding{Kind::kLink, a, b, "cannot be reached"});
        }
      }
    }
  }

  TEST_CASE("a link that loses packets or is slow is told where it is measured") {
    for (int64_t hosts = 4; hosts <= 9; ++hosts) {
      for (int64_t a = 0; a + 1 < hosts; a += 2) {
        for (const bool slow : {false, true}) {
          CAPTURE(hosts);
          CAPTURE(a);
          Planted planted;
          planted.pair = [&](PairFigures& pair) {
            if (!touches(pair, a) || !touches(pair, a + 1) || pair.reach) return;
            if (slow) pair.gb_s = 0.1;
            if (!slow) pair.stalls = pair.resent = 50;
          };
          const std::vector<CheckFinding> found = check(hosts, planted);
          REQUIRE(found.size() == 1);
          CHECK(found[0].kind == Kind::kLink);
          CHECK(std::pair(found[0].a, found[0].b) == std::pair(a, a + 1));
        }
      }
    }
  }

  TEST_CASE("of two hosts neither is blamed for what is between them") {
    Planted planted;
    planted.pair = [](PairFigures& pair) { pair.failed = "timeout"; };
    const std::vector<CheckFinding> found = check(2, planted);
    REQUIRE(found.size() == 1);
    CHECK(found[0].kind == Kind::kNetwork);
    CHECK(found[0].why.starts_with("between h0, h1: h0 and h1: timeout"));
  }

  TEST_CASE("where most hosts are ill it is the network, and nobody is blamed") {
    for (int64_t hosts = 2; hosts <= 9; ++hosts) {
      for (int64_t well = 0; 2 * well < hosts; ++well) {
        CAPTURE(hosts);
        CAPTURE(well);  // the first ones
        Planted planted;
        planted.pair = [&](PairFigures& pair) {
          if (pair.a >= well || pair.b >= well) pair.failed = "timeout";
        };
        for (const CheckFinding& one : check(hosts, planted)) {
          CHECK(one.kind == Kind::kNetwork);
        }
        CHECK(!check(hosts, planted).empty());
        planted = {};
        planted.host = [&](int64_t host, HostFigures& one) {
          if (host >= well) one.failed = "no room";
        };
        for (const CheckFinding& one : check(hosts, planted)) CHECK(one.kind == Kind::kNetwork);
      }
    }
  }

  TEST_CASE("two hosts that are ill are both blamed, and a cut link besides") {
    Planted planted;
    planted.host = [](int64_t host, HostFigures& one) {
      if (host == 1) one.matmul_gflops = 20;
    };
    planted.pair = [](PairFigures& pair) {
      if (touches(pair, 6) && !pair.reach) pair.stalls = pair.resent = 30;
      if (touches(pair, 2) && touches(pair, 5)) pair.failed = "cut";
    };
    std::vector<CheckFinding> found = check(8, planted);
    REQUIRE(found.size() == 3);
    CHECK(found[0].kind == Kind::kSlowHost);
    CHECK(found[0].a == 1);
    CHECK(found[1].kind == Kind::kHost);
    CHECK(found[1].a == 6);
    CHECK(found[2] == CheckFinding{Kind::kLink, 2, 5, "cut"});
  }

  TEST_CASE("what one measurement alone has seen blames nobody, nor a link") {
    for (int64_t hosts = 4; hosts <= 9; ++hosts) {
      for (int64_t ill = 0; ill < hosts; ++ill) {
        int64_t measured = 0, paired = 0;
        Planted planted;
        planted.host = [&](int64_t host, HostFigures& one) {
          if (host == ill && measured++ == 0) one.matmul_gflops = 10;
        };
        planted.pair = [&](PairFigures& pair) {
          if (touches(pair, ill) && !pair.reach && paired++ == 0) pair.gb_s = 0.01;
        };
        CAPTURE(hosts);
        CAPTURE(ill);
        CHECK(check(hosts, planted).empty());
      }
    }
  }

  TEST_CASE("hosts that are busy for half a second at a time lose no packets") {
    for (int64_t hosts = 2; hosts <= 9; ++hosts) {
      CAPTURE(hosts);
      Planted planted;
      planted.pair = [](PairFigures& pair) {
        if (touches(pair, 1) && !pair.reach) pair.stalls = 150;
      };
      CHECK(check(hosts, planted).empty());
    }
  }

  TEST_CASE("noise blames no host") {
    std::mt19937 draw(7);
    for (int round = 0; round < 2000; ++round) {
      const int64_t hosts = 2 + round % 8;
      std::uniform_real_distribution<double> some(0.6, 1.4);
      Planted planted;
      planted.host = [&](int64_t, HostFigures& one) {
        one.matmul_gflops *= some(draw);
        one.copy_gb_s *= some(draw);
        one.write_mb_s *= some(draw) * some(draw);
      };
      planted.pair = [&](PairFigures& pair) {
        pair.gb_s *= some(draw);
        pair.trip_us *= 5 * some(draw);
        pair.stalls = pair.reach ? 0 : round % 3;
        pair.resent = 100;
      };
      CAPTURE(round);
      CHECK(check(hosts, planted).empty());
    }
  }
}
