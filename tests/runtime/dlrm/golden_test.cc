// The example of the reference implementation's README: three steps of a tiny model, to the digits it prints.

#include <doctest/doctest.h>

#include "tests/runtime/dlrm/worlds.h"

using namespace cairn;
using namespace cairn::dlrm;
using namespace cairn::dlrm::testing;

namespace {

DlrmConfig golden_config() {
  return {.dense = 4,
          .dim = 2,
          .tables = {{"0", 4}, {"1", 3}, {"2", 2}},
          .bottom = {3, 2},
          .top = {4, 2, 1},
          .loss = ClickLoss::kMeanSquare};
}

const DlrmOptimizer kGoldenSgd{.rule = DlrmRule::kSgd, .lr = 0.01};

template <typename T>
State<T> typed(const std::map<std::string, std::vector<double>>& from) {
  State<T> to;
  for (const auto& [name, tensor] : from) to[name] = std::vector<T>(tensor.begin(), tensor.end());
  return to;
}

template <typename T>
State<T> before() {
  return typed<T>(
      {{"table.0", {.05438, -.11105, .42513, .34167, -.1426, -.45641, -.19523, -.10181}},
       {"table.1", {.23667, .57199, -.16638, .30316, .10759, .22136}},
       {"table.2", {-.49338, -.14301, -.36649, -.22139}},
       {"bottom.0.weight",
        {.51313, .66662, .10591, .13089, .32198, .66156, .84651, .55326, .85445, .38484, .31679, .35426}},
       {"bottom.0.bias", {.17108, .82911, .33867}},
       {"bottom.1.weight", {.55237, .57855, .52153, .00269, .98835, .90534}},
       {"bottom.1.bias", {.20764, .29249}},
       {"top.0.weight", {.52001, .90191, .98363, .25754, .56436, .80697, .39437, .73107, .16107, .6007, .86586,
                         .98352, .07937, .42835, .20454, .45064, .54776, .09333, .29686, .92758, .569,  .45741,
                         .75353, .74186, .04858, .7087,  .83924, .16594, .781,   .28654, .30647, .66526}},
       {"top.0.bias", {.11139, .66487, .88786, .69631}},
       {"top.1.weight", {.44033, .43821, .7651, .56564, .0849, .58267, .81484, .33707}},
       {"top.1.bias", {.92758, .75072}},
       {"top.2.weight", {.57406, .75164}},
       {"top.2.bias", {.07915}}});
}

template <typename T>
State<T> after() {
  return typed<T>({{"table.0", {.0542935, -.1112041, .4251288, .3416680, -.1428257, -.4567902, -.1953158, -.1019632}},
                   {"table.1", {.2366700, .5719900, -.1666065, .3028430, .1075094, .2212429}},
                   {"table.2", {-.4933800, -.1430101, -.3666471, -.2216466}},
                   {"bottom.0.weight",
                    {.5131315, .6666222, .1059117, .1308917, .3219624, .6615374, .8464925, .5532422, .8544339, .3848192,
                     .3167740, .3542437}},
                   {"bottom.0.bias", {.1710844, .8290643, .3386281}},
                   {"bottom.1.weight", {.5523763, .5785649, .5215389, .0026498, .9882571, .9052831}},
                   {"bottom.1.bias", {.2076483, .2924389}},
                   {"top.0.weight", {.5199602, .9018422, .9836759, .2575199, .5643645, .8070033, .3943658, .7310709,
                                     .1609616, .6005524, .8659601, .9834762, .0793798, .4284224, .2045308, .4506421,
                                     .5475946, .0931049, .2970126, .9275132, .5690150, .4575205, .7535160, .7418631,
                                     .0484891, .7085763, .8393239, .1659033, .7810082, .2866007, .3064623, .6652617}},
                   {"top.0.bias", {.1113682, .6648224, .8877875, .6962701}},
                   {"top.1.weight", {.4402919, .4381573, .7650226, .5656073, .0848501, .5826010, .8147386, .3370272}},
                   {"top.1.bias", {.9275404, .7506682}},
                   {"top.2.weight", {.5737911, .7514000}},
                   {"top.2.bias", {.0790810}}});
}

Bags bags(const std::vector<std::vector<int32_t>>& of_samples) {
  Bags out;
  for (const auto& rows : of_samples) {
    out.rows.insert(out.rows.end(), rows.begin(), rows.end());
    out.offsets.push_back(std::ssize(out.rows));
  }
  return out;
}

std::vector<ClickBatch> golden_batches() {
  return {{2,
           {.55679f, .15896f},
           {.69647f, .28614f, .22685f, .55131f, .71947f, .42311f, .98076f, .68483f},
           {bags({{1}, {0, 1}}), bags({{0}, {1}}), bags({{1}, {0}})}},
          {2,
           {.15307f, .69553f},
           {.36179f, .22826f, .29371f, .63098f, .0921f, .4337f, .43086f, .49369f},
           {bags({{1}, {0, 2, 3}}), bags({{1}, {1, 2}}), bags({{1}, {1}})}},
          {2,
           {.31877f, .69197f},
           {.60306f, .54507f, .34276f, .30412f, .41702f, .6813f, .87546f, .51042f},
           {bags({{2}, {0, 1, 2}}), bags({{1}, {2}}), bags({{1}, {1}})}}};
}

struct Cut {
  std::string name;
  int64_t world;
  std::vector<TableCut> cuts;
};

const std::vector<Cut> kCuts = {
    {"one rank", 1, {on(0), on(0), on(0)}},
    {"whole tables", 2, {on(0), on(1), on(1)}},
    {"whole tables, a rank without any", 3, {on(0), on(2), on(2)}},
    {"columns", 2, {columns({0, 1}), columns({1, 0}), columns({0, 1})}},
    {"columns on one rank", 1, {columns({0, 0}), columns({0, 0}), columns({0, 0})}},
    {"rows", 2, {rows({0, 1}), rows({1, 0}), rows({0, 1})}},
    {"more ranks than rows or samples", 5, {rows({0, 1, 2, 3, 4}), rows({4, 3, 2, 1, 0}), rows({0, 1, 2, 3, 4})}},
    {"copies", 2, {copies(), copies(), copies()}},
    {"a mix", 4, {rows({1, 3}), columns({2, 0}), copies()}},
};

template <typename T>
void check_golden(double loss_tolerance, double tolerance) {
  constexpr double kLosses[] = {0.4518907, 0.4020019, 0.2754574};
  for (const Cut& cut : kCuts) {
    CAPTURE(cut.name);
    const Trained<T> got = train<T>(golden_config(), kGoldenSgd, cut.cuts, cut.world, golden_batches(), before<T>());
    REQUIRE(got.error == "");
    REQUIRE(got.losses.size() == 3);
    for (size_t i = 0; i < 3; ++i) CHECK(std::abs(got.losses[i] - kLosses[i]) <= loss_tolerance);
    CHECK(distance(got.state, after<T>()) <= tolerance);
  }
}

}  // namespace

TEST_SUITE("runtime/dlrm/golden") {
  TEST_CASE("three steps in double give the published losses and parameters, by every cut") {
    check_golden<double>(1e-6, 1e-6);
  }

  TEST_CASE("three steps in float give the published losses and parameters, by every cut") {
    check_golden<float>(2e-5, 2e-5);
  }
}
