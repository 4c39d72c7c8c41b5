#include "ckpt/retention/labels.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "ckpt/retention/catalog.h"
#include "ckpt/retention/label_store.h"
#include "ckpt/retention/policy.h"
#include "ckpt/retention/references.h"
#include "ckpt/retention/retention.h"
#include "ckpt/store/fault_backend.h"
#include "ckpt/store/memory_backend.h"
#include "runtime/core/random.h"
#include "tests/ckpt/persist/test_state.h"

using namespace cairn;
using namespace cairn::ckpt;
using namespace cairn::ckpt::testing;
namespace fs = std::filesystem;

namespace {

const fs::path kDir = "/ck";
const WriterId kWriter{"test", 1, 1, 9};
const WatchRules kRules{.ceiling = loss_ceiling(256)};

std::vector<TensorSpec> one_tensor() { return {{"a", "weight", DType::kF32, {30}, 1}}; }

void add_step(IoBackend& io, int64_t step) {
  REQUIRE(save(io, kDir, make_state(step, static_cast<uint64_t>(step), 1, one_tensor())).ok());
}

/// A quiet run's step: a loss that falls, and noise that no draw of it makes an outlier.
StepNumbers quiet(int64_t step) {
  const double noise = static_cast<double>(mix64(static_cast<uint64_t>(step)) % 1000) / 1000 - 0.5;
  return {step, 3 + 2 * std::exp(-static_cast<double>(step) / 200) + 0.1 * noise, std::exp(0.3 * noise)};
}

StepJudge run_to(int64_t last, const WatchRules& rules = kRules) {
  StepJudge judge(rules);
  for (int64_t step = 1; step <= last; ++step) judge.add(quiet(step));
  return judge;
}

Label label_of(const StepJudge& judge, int64_t step, int64_t run_steps = 1'000'000) {
  const auto verdict = judge.judge(step, run_steps);
  REQUIRE(verdict);
  return verdict->label;
}

CheckpointInfo labelled(int64_t step, Label label) {
  CheckpointInfo info{.step = step, .complete = true, .created_unix_ms = step * 1000};
  info.metrics["loss"] = 1.0 / static_cast<double>(step);
  info.label = label;
  return info;
}

std::vector<int64_t> staying(const std::vector<CheckpointInfo>& all, const RetentionPolicy& policy) {
  std::vector<int64_t> out;
  for (const Fate& fate : plan_retention(all, policy).value()) {
    if (fate.stays) out.push_back(fate.step);
  }
  return out;
}

using Steps = std::vector<int64_t>;

}  // namespace

TEST_SUITE("ckpt/retention/labels") {
  TEST_CASE("a save is good once as many clean steps have followed as prove it, and not a step before") {
    StepJudge judge = run_to(431);
    CHECK(label_of(judge, 400) == Label::kNew);
    judge.add(quiet(432));
    CHECK(label_of(judge, 400) == Label::kGood);
    CHECK(judge.judge(400, 1000)->proved_to == 432);
    CHECK(label_of(judge, 401) == Label::kNew);
    CHECK_FALSE(judge.judge(433, 1000));  // not reached
  }

  TEST_CASE("an outlier upwards of loss or norm within the proof makes saves on both sides suspect, and no others") {
    for (const bool of_loss : {true, false}) {
      CAPTURE(of_loss);
      StepJudge judge = run_to(399);
      StepNumbers spike = quiet(400);
      (of_loss ? spike.loss : spike.grad_norm) *= of_loss ? 1.4 : 30;
      judge.add(spike);
      for (int64_t step = 401; step <= 600; ++step) judge.add(quiet(step));
      CHECK(label_of(judge, 367) == Label::kGood);     // its proof ended at 399
      CHECK(label_of(judge, 368) == Label::kSuspect);  // 400 is the last step of its proof
      CHECK(label_of(judge, 399) == Label::kSuspect);
      CHECK(label_of(judge, 400) == Label::kSuspect);
      CHECK(label_of(judge, 431) == Label::kSuspect);
      CHECK(label_of(judge, 432) == Label::kGood);
      CHECK(judge.judge(399, 1000)->why.find(of_loss ? "step 400: loss" : "step 400: gradient norm") == 0);
    }
  }

  TEST_CASE("an outlier whose update was left out makes no save suspect, and counts as trouble all the same") {
    StepJudge judge = run_to(399);
    for (int64_t step = 400; step <= 403; ++step) {
      StepNumbers spike = quiet(step);
      spike.loss *= 1.4;
      spike.skipped = true;
      const auto alarm = judge.add(spike);
      REQUIRE(alarm);
      CHECK((alarm->kind == StepAlarm::Kind::kDivergence) == (step == 403));
    }
    CHECK_FALSE(judge.onset());
    for (int64_t step = 404; step <= 434; ++step) judge.add(quiet(step));
    CHECK(label_of(judge, 399) == Label::kNew);  // it proves nothing either
    CHECK(label_of(judge, 402) == Label::kNew);
    judge.add(quiet(435));
    CHECK(judge.judge(399, 1000)->proved_to == 435);
    CHECK(label_of(judge, 399) == Label::kGood);
    CHECK(label_of(judge, 402) == Label::kGood);
    CHECK(label_of(judge, 403) == Label::kGood);
    StepJudge young(kRules);  // at its end all steps that were no outliers count
    for (int64_t step = 1; step <= 12; ++step) young.add({step, 5.5, 1});
    CHECK(label_of(young, 12, 12) == Label::kGood);
  }

  TEST_CASE("steps without a token to guess prove no save, and are no other level") {
    StepJudge judge = run_to(399);
    for (int64_t step = 400; step <= 599; ++step)
      CHECK_FALSE(judge.add({.step = step, .loss = std::nan(""), .grad_norm = std::nan(""), .skipped = true}));
    CHECK(label_of(judge, 399) == Label::kNew);
    CHECK(label_of(judge, 500) == Label::kNew);
    for (int64_t step = 600; step <= 631; ++step) judge.add(quiet(step));
    CHECK(label_of(judge, 399) == Label::kGood);
    StepNumbers spike = quiet(632);
    spike.loss *= 1.4;
    CHECK(judge.add(spike));
  }

  TEST_CASE("ruined weights prove nothing where a guard leaves all later updates out") {
    StepJudge judge = run_to(200);
    for (int64_t step = 201; step <= 400; ++step) judge.add({step, 99.8, 30, true});
    for (const int64_t step : {201, 250, 300, 368}) CHECK(label_of(judge, step) == Label::kSuspect);
    CHECK(label_of(judge, 150) == Label::kGood);
    CHECK(label_of(judge, 400, 400) == Label::kSuspect);
    CHECK(judge.onset()->above);
    StepJudge below = run_to(200);  // the ceiling says nothing of these
    for (int64_t step = 201; step <= 207; ++step) below.add({step, 8, 1, true});
    CHECK(label_of(below, 205) == Label::kNew);
    CHECK(label_of(below, 207, 207) == Label::kGood);  // as step 200
  }

  TEST_CASE("ranks that start again in a trouble do not raise its alarms twice; behind its end a new one is raised") {
    const auto kinds = [](StepJudge& judge, int64_t from, int64_t to, double loss) {
      std::vector<StepAlarm::Kind> out;
      for (int64_t step = from; step <= to; ++step) {
        if (const auto alarm = judge.add({step, loss, 1})) out.push_back(alarm->kind);
      }
      return out;
    };
    using Kind = StepAlarm::Kind;
    StepJudge judge = run_to(400);
    CHECK(kinds(judge, 401, 404, 9) == std::vector{Kind::kOutlier, Kind::kOutlier, Kind::kOutlier, Kind::kDivergence});
    judge.go_back(404);
    CHECK(kinds(judge, 405, 409, 9).empty());
    judge.go_back(402);  // before the step that raised it
    CHECK(kinds(judge, 403, 405, 9) == std::vector{Kind::kOutlier, Kind::kDivergence});
    judge.go_back(405);
    CHECK(kinds(judge, 406, 413, quiet(406).loss).empty());
    judge.go_back(413);
    CHECK(kinds(judge, 414, 417, 9) == std::vector{Kind::kOutlier, Kind::kOutlier, Kind::kOutlier, Kind::kDivergence});
  }

  TEST_CASE("outliers from before the rate was lowered are of another trouble than those behind it") {
    for (const int64_t trouble_after : {int64_t{0}, int64_t{403}}) {
      CAPTURE(trouble_after);
      StepJudge judge(kRules, trouble_after);
      for (int64_t step = 1; step <= 399; ++step) judge.add(quiet(step));
      for (int64_t step = 400; step <= 403; ++step) judge.add({step, 9, 1});  // a start reads them again
      judge.go_back(403);
      judge.raise_again();
      std::vector<StepAlarm> told;
      for (int64_t step = 404; step <= 407; ++step) {
        if (const auto alarm = judge.add({step, 9, 1})) told.push_back(*alarm);
      }
      REQUIRE(!told.empty());
      CHECK(label_of(judge, 402) == Label::kSuspect);
      const bool anew = trouble_after > 0;
      CHECK((told.front().kind == StepAlarm::Kind::kDivergence) == !anew);
      CHECK((told.back().kind == StepAlarm::Kind::kDivergence) == anew);
      if (anew) CHECK(told.back().onset == 404);
    }
  }

  TEST_CASE("an audit that fails makes what was saved since the last clean one suspect, good ones too") {
    StepJudge judge = run_to(500);
    Labels labels{{400, {.label = Label::kGood, .by = "hand", .saved_unix_ms = 4}}};
    const std::vector<std::pair<int64_t, int64_t>> saves = {{300, 3}, {400, 4}, {410, 5}, {501, 6}, {502, 7}};
    judge_saves(judge, saves, 1000, 1, labels);
    CHECK(labels.at(410).label == Label::kGood);
    StepNumbers audit = quiet(501);
    audit.suspect_from = 351;
    judge.add(audit);
    for (int64_t step = 502; step <= 600; ++step) judge.add(quiet(step));
    judge_saves(judge, saves, 1000, 2, labels);
    CHECK(labels.at(300).label == Label::kGood);
    CHECK(labels.at(400).label == Label::kGood);  // a person's word
    CHECK(labels.at(410).label == Label::kSuspect);
    CHECK(labels.at(410).why.find("step 501 found an error of the machine") == 0);
    CHECK(labels.at(501).label == Label::kSuspect);
    CHECK(labels.at(502).label == Label::kGood);
    StepNumbers replicas = quiet(601);
    replicas.suspect_from = 550;
    replicas.stays = true;
    judge.add(replicas);
    for (int64_t step = 602; step <= 700; ++step) judge.add(quiet(step));
    CHECK(label_of(judge, 549) == Label::kGood);
    CHECK(label_of(judge, 550) == Label::kSuspect);
    CHECK(label_of(judge, 650) == Label::kSuspect);  // replicas that differ do not become equal by themselves
    judge.go_back(549);
    for (int64_t step = 550; step <= 700; ++step) judge.add(quiet(step));
    CHECK(label_of(judge, 550) == Label::kGood);
  }

  TEST_CASE("a drop is no outlier upwards, an fp16 overflow's norm none at all") {
    StepJudge judge = run_to(399);
    judge.add({400, quiet(400).loss * 0.5, 1});
    judge.add({401, quiet(401).loss, std::nan("")});
    judge.add({402, quiet(402).loss, INFINITY});
    for (int64_t step = 403; step <= 500; ++step) judge.add(quiet(step));
    CHECK(label_of(judge, 399) == Label::kGood);
  }

  TEST_CASE("a loss worse than knowing nothing is an outlier in the first steps too; a young run's noise is none") {
    StepJudge judge(kRules);
    for (int64_t step = 1; step <= 40; ++step) judge.add({step, 5.5 + (step % 3), 1.0 * static_cast<double>(step)});
    CHECK(label_of(judge, 5) == Label::kGood);
    StepJudge bad(kRules);
    for (int64_t step = 1; step <= 40; ++step) bad.add({step, step == 20 ? 9.4 : 5.5, 1});
    CHECK(1.5 * std::log(256) + 1 < 9.4);
    CHECK(label_of(bad, 5) == Label::kSuspect);
    CHECK(bad.onset(40)->step == 20);
    CHECK(bad.onset(40)->above);
    CHECK_FALSE(bad.onset());  // not among the last eight
    for (const int64_t step : {41, 42, 43}) bad.add({step, step == 42 ? 5.5 : 9.4, 1});
    CHECK(bad.onset()->step == 41);
  }

  TEST_CASE("before verdicts begin, or with less than half a window, only the ceiling counts") {
    for (const int64_t begin : {90, 91}) {
      WatchRules rules = kRules;
      rules.begin = begin;
      StepJudge judge = run_to(89, rules);
      judge.add({90, quiet(90).loss, 30});
      for (int64_t step = 91; step <= 130; ++step) judge.add(quiet(step));
      CHECK(label_of(judge, 85) == (begin == 90 ? Label::kSuspect : Label::kGood));
    }
    for (const int64_t known : {63, 64}) {  // as after a start without metrics.jsonl
      StepJudge judge(kRules);
      for (int64_t step = 201; step <= 200 + known; ++step) judge.add(quiet(step));
      judge.add({201 + known, quiet(201 + known).loss, 30});
      for (int64_t step = 202 + known; step <= 300; ++step) judge.add(quiet(step));
      CHECK(label_of(judge, 255) == (known == 64 ? Label::kSuspect : Label::kGood));
    }
  }

  TEST_CASE("steps that a drop makes low, however many, do not make the others outliers") {
    StepJudge judge = run_to(299);
    for (int64_t step = 300; step <= 600; ++step)
      judge.add({step, quiet(step).loss * (step % 3 == 0 ? 1 : 0.5), quiet(step).grad_norm});
    CHECK(label_of(judge, 550) == Label::kGood);
  }

  TEST_CASE("the first outliers raise alarms, a divergence and a drop raise one, and a quiet time ends the trouble") {
    using Kind = StepAlarm::Kind;
    StepJudge judge = run_to(399);
    std::vector<StepAlarm> told;
    const auto add = [&](int64_t step, double loss) {
      StepNumbers numbers = quiet(step);
      if (loss > 0) numbers.loss = loss;
      if (auto alarm = judge.add(numbers)) told.push_back(*alarm);
    };
    const auto kinds = [&] {
      std::vector<std::pair<Kind, int64_t>> out;
      for (const StepAlarm& alarm : std::exchange(told, {})) out.emplace_back(alarm.kind, alarm.step);
      return out;
    };
    using Told = std::vector<std::pair<Kind, int64_t>>;
    // Five upwards of eight steps: the fourth is a divergence since the first.
    for (const int64_t step : {400, 401, 402, 403, 404, 405, 406}) add(step, step == 401 || step == 403 ? 0 : 9);
    REQUIRE(told.size() == 4);
    CHECK(told[3].onset == 400);
    CHECK(told[3].why.find("loss 9") == 0);
    CHECK(kinds() ==
          Told{{Kind::kOutlier, 400}, {Kind::kOutlier, 402}, {Kind::kOutlier, 404}, {Kind::kDivergence, 405}});
    for (int64_t step = 407; step < 430; ++step) add(step, 0);
    CHECK(told.empty());
    for (int64_t step = 430; step < 434; ++step) add(step, 0.1);  // far below
    REQUIRE(told.size() == 4);
    CHECK(told[3].onset == 430);
    CHECK(told[0].why.find("below") != std::string::npos);
    CHECK(kinds() == Told{{Kind::kOutlier, 430}, {Kind::kOutlier, 431}, {Kind::kOutlier, 432}, {Kind::kDrop, 433}});
    for (int64_t step = 434; step < 450; ++step) add(step, 0);
    add(450, 9);
    CHECK(kinds() == Told{{Kind::kOutlier, 450}});
    for (int64_t step = 451; step < 460; ++step) add(step, 0);
    // A level that stays: each tenth outlier, and the end of it.
    for (int64_t step = 460; step < 460 + 64; ++step) add(step, 9);
    Told wanted = {{Kind::kOutlier, 460}, {Kind::kOutlier, 461}, {Kind::kOutlier, 462}, {Kind::kDivergence, 463}};
    for (int64_t step = 469; step < 520; step += 10) wanted.emplace_back(Kind::kOutlier, step);
    wanted.emplace_back(Kind::kLevelShift, 523);
    CHECK(kinds() == wanted);
    for (int64_t step = 524; step < 600; ++step) add(step, 9);
    CHECK(told.empty());
    // A run that goes back raises its alarms anew.
    judge.go_back(449);
    add(450, 9);
    CHECK(kinds() == Told{{Kind::kOutlier, 450}});
  }

  TEST_CASE("a change of data or rate is no outlier: later steps are compared among themselves") {
    WatchRules rules = kRules;
    for (const int64_t level_after : {int64_t{0}, int64_t{400}}) {
      rules.level_after = level_after;
      StepJudge judge(rules);
      int64_t alarms = 0, late = 0;
      for (int64_t step = 1; step <= 600; ++step) {
        StepNumbers numbers = quiet(step);
        if (step > 400) numbers.loss += 4;
        alarms += judge.add(numbers).has_value();
      }
      StepNumbers numbers = quiet(601);
      numbers.loss += 9;
      late += judge.add(numbers).has_value();
      CHECK((alarms > 0) == (level_after == 0));
      CHECK(late == 1);
    }
  }

  TEST_CASE("the end of a run proves its last save by the steps before, unless they, or its own end, were not clean") {
    CHECK(label_of(run_to(12), 12, 12) == Label::kGood);
    CHECK(label_of(run_to(12), 12, 30) == Label::kNew);  // stopped, not at its end
    CHECK(label_of(run_to(12), 10, 12) == Label::kNew);
    StepJudge late(kRules);  // a start that knows few of the steps before
    for (int64_t step = 201; step <= 231; ++step) late.add(quiet(step));
    CHECK(label_of(late, 231, 231) == Label::kNew);
    late.add(quiet(232));
    CHECK(label_of(late, 232, 232) == Label::kGood);
    StepJudge spiked = run_to(299);
    spiked.add({300, 8, 1});
    for (int64_t step = 301; step <= 310; ++step) spiked.add(quiet(step));
    CHECK(label_of(spiked, 310, 310) == Label::kSuspect);
    StepJudge ruined = run_to(12);
    ruined.set_end_loss(12, 1e9);
    CHECK(label_of(ruined, 12, 12) == Label::kSuspect);
    ruined.set_end_loss(12, 4);
    CHECK(label_of(ruined, 12, 12) == Label::kGood);
  }

  TEST_CASE("labels: after the level of losses has moved, new saves are normal again") {
    StepJudge judge = run_to(299);
    const auto moved = [](int64_t step) { return StepNumbers{step, quiet(step).loss + 1.5, 1}; };
    for (int64_t step = 300; step <= 600; ++step) judge.add(moved(step));
    CHECK(label_of(judge, 300) == Label::kSuspect);
    CHECK(label_of(judge, 394) == Label::kSuspect);  // 363 was the last of half a window of outliers
    CHECK(label_of(judge, 395) == Label::kGood);
    CHECK(label_of(judge, 500) == Label::kGood);
  }

  TEST_CASE("a run that goes back is judged by what follows again") {
    StepJudge judge = run_to(399);
    judge.add({400, 8, 1});
    CHECK(label_of(judge, 395) == Label::kSuspect);
    judge.go_back(395);
    for (int64_t step = 396; step <= 427; ++step) judge.add(quiet(step));
    CHECK(label_of(judge, 395) == Label::kGood);
    judge.add(quiet(396));  // a step that comes again says the same
    CHECK(judge.last() == 396);
    CHECK(label_of(judge, 395) == Label::kNew);
    StepJudge ruined = run_to(12);  // and by its own end
    ruined.set_end_loss(12, 1e9);
    ruined.go_back(11);
    ruined.add(quiet(12));
    CHECK(label_of(ruined, 12, 12) == Label::kGood);
  }

  TEST_CASE("good, bad and a person's word stay; what is new or suspect is judged again; another save is another") {
    const StepJudge judge = run_to(100);
    Labels labels;
    CHECK(judge_saves(judge, {{50, 1}, {90, 2}}, 1000, 5, labels));
    CHECK(labels.at(50).label == Label::kGood);
    CHECK(labels.at(90).label == Label::kNew);
    CHECK_FALSE(judge_saves(judge, {{50, 1}, {90, 2}}, 1000, 6, labels));
    labels.at(50).label = Label::kBad;
    labels.at(50).by = "guard";
    labels.at(90) = {.label = Label::kSuspect, .why = "mine", .by = "hand", .saved_unix_ms = 2};
    CHECK_FALSE(judge_saves(run_to(200), {{50, 1}, {90, 2}}, 1000, 7, labels));
    CHECK(judge_saves(run_to(200), {{50, 10}, {90, 20}}, 1000, 7, labels));  // saved anew
    CHECK(labels.at(50).label == Label::kGood);
    CHECK(labels.at(90).label == Label::kGood);
    Labels kept = labels;
    CHECK_FALSE(judge_saves(run_to(200), {{90, 20}}, 1000, 7, kept, {50}));  // 50 is there, and cannot be read just now
    CHECK(kept.contains(50));
    CHECK(judge_saves(run_to(200), {{90, 20}}, 1000, 7, labels));
    CHECK(labels.size() == 1);
  }

  TEST_CASE("labels as text: what is read is what was written, and damage is told with its place") {
    Labels labels;
    labels[12] = {
        .label = Label::kGood, .why = "ends the run", .proved_to = 12, .time = 1.5, .by = "watch", .saved_unix_ms = 77};
    labels[13] = {.label = Label::kBad, .why = "\"nan\"\n", .by = "guard", .saved_unix_ms = 78, .held = "asked for"};
    CHECK(decode_labels(encode_labels(labels)).value() == labels);
    for (const char* wrong : {"", "[]", "{}", R"({"schema":2,"steps":{}})", R"({"schema":1,"steps":{"x":{}}})",
                              R"({"schema":1,"steps":{"7":{"label":"fine"}}})", R"({"schema":1,"steps":[]})"}) {
      CAPTURE(wrong);
      const Result<Labels> read = decode_labels(wrong);
      REQUIRE_FALSE(read.ok());
      CHECK(read.error().code == ErrorCode::kCorrupt);
    }
    const std::string whole = encode_labels(labels);
    for (const char* field : {"label", "why", "proved_to", "saved_unix_ms", "by", "time", "held"}) {
      const std::string key = '"' + std::string(field) + "\": ";
      for (const bool named : {true, false}) {  // of another kind; not there, which `held` need not be
        std::string wrong = whole;
        const size_t at = wrong.rfind(key);
        REQUIRE(at != std::string::npos);
        wrong.replace(at, key.size(), named ? key + "[], \"x\": " : "\"x\": ");
        CAPTURE(wrong);
        const Result<Labels> read = decode_labels(wrong);
        REQUIRE(read.ok() == (!named && std::string_view(field) == "held"));
        if (!read.ok()) CHECK(read.error().message.find("step 13: \"" + std::string(field) + '"') == 0);
      }
    }
    CHECK_FALSE(decode_labels(std::string(whole).replace(whole.find("\"good\""), 6, "\"fine\"")).ok());
    for (size_t n = 0; n + 2 < whole.size(); ++n) REQUIRE_FALSE(decode_labels(whole.substr(0, n)).ok());
  }

  TEST_CASE("of two folders' labels the person's word counts, then the later; of two saves the later save's") {
    Labels ours{{1, {.label = Label::kNew, .time = 5, .by = "watch", .saved_unix_ms = 1}}};
    merge_labels({{1, {.label = Label::kGood, .time = 4, .by = "watch", .saved_unix_ms = 1}}}, ours);
    CHECK(ours.at(1).label == Label::kNew);
    merge_labels({{1, {.label = Label::kGood, .time = 6, .by = "watch", .saved_unix_ms = 1}}}, ours);
    CHECK(ours.at(1).label == Label::kGood);
    merge_labels({{1, {.label = Label::kBad, .time = 1, .by = "hand", .saved_unix_ms = 1}}}, ours);
    CHECK(ours.at(1).label == Label::kBad);
    merge_labels({{1, {.label = Label::kNew, .time = 1, .by = "watch", .saved_unix_ms = 2}}}, ours);
    CHECK(ours.at(1).label == Label::kNew);
  }
}

TEST_SUITE("ckpt/retention/labels/policy") {
  TEST_CASE("under every kind of rule the newest, the newest good one and the candidate stay, and bad ones go") {
    const std::vector<CheckpointInfo> all{labelled(10, Label::kGood),    labelled(20, Label::kGood),
                                          labelled(30, Label::kSuspect), labelled(40, Label::kNew),
                                          labelled(50, Label::kSuspect), labelled(60, Label::kNew),
                                          labelled(70, Label::kNew),     labelled(80, Label::kBad)};
    for (const char* rules : {"last(1)", "every(1000)", "at(1000)", "best(loss, 1)", "within(1s)", "fractions(1)",
                              "last(1), every(1d), best(valid_loss, 1)"}) {
      CAPTURE(rules);
      const Steps stays = staying(all, retention_policy(parse_keep(rules).value(), 100));
      for (const int64_t step : {20, 40, 70}) CHECK(std::ranges::count(stays, step) == 1);
      CHECK(std::ranges::count(stays, 80) == 0);
      CHECK(std::ranges::count(stays, 50) == 0);
    }
    CHECK(staying(all, retention_policy(parse_keep("last(1)").value(), 100)) == Steps{20, 40, 70});
    RetentionPolicy policy = retention_policy(parse_keep("last(1)").value(), 100);
    policy.even_good = true;
    CHECK(staying(all, policy) == Steps{70});
    std::vector<CheckpointInfo> held = all;
    held[2].held = "checkpoint.keep was changed";
    CHECK(staying(held, retention_policy(parse_keep("last(1)").value(), 100)) == Steps{20, 30, 40, 70});
  }

  TEST_CASE("rules do not count bad ones, and where nothing else is complete nothing goes") {
    const std::vector<CheckpointInfo> all{labelled(10, Label::kSuspect), labelled(20, Label::kSuspect),
                                          labelled(30, Label::kBad)};
    CHECK(staying(all, {2, {}}) == Steps{10, 20});
    CHECK(staying({labelled(10, Label::kBad), labelled(20, Label::kBad)}, {1, {}}) == Steps{10, 20});
    std::vector<CheckpointInfo> needed = all;
    needed[1].references = {30};  // as after a way back
    CHECK(staying(needed, {1, {}}) == Steps{20, 30});
  }

  TEST_CASE("a person who names the last good one, or the candidate, is refused without --even-good") {
    const std::vector<CheckpointInfo> all{labelled(10, Label::kGood), labelled(20, Label::kNew),
                                          labelled(30, Label::kNew), labelled(40, Label::kBad)};
    CHECK(plan_removal(all, {10}).error().message.find("step 10 stays") == 0);
    CHECK(plan_removal(all, {20}).error().message.find("step 20 stays") == 0);
    CHECK(plan_removal(all, {30}).error().message.find("step 30 stays, for it is the newest") == 0);
    CHECK(plan_removal(all, {40}).ok());
    CHECK(plan_removal(all, {10, 20}, true).ok());
    CHECK_FALSE(plan_removal(all, {30}, true).ok());
  }

  TEST_CASE("steps that a changed rule or length would remove, and the old rules keep, are held") {
    std::vector<CheckpointInfo> present;
    for (int64_t step = 10; step <= 100; step += 10) present.push_back(labelled(step, Label::kSuspect));
    const auto keep = [](const char* text) { return parse_keep(text).value(); };
    const auto removed = [&](const char* before, int64_t old_steps, const char* after, int64_t new_steps) {
      return removed_by_change(present, keep(before), old_steps, keep(after), new_steps).value();
    };
    CHECK(removed("last(3)", 100, "last(1)", 100) == Steps{80, 90});
    CHECK(removed("last(1)", 100, "last(3)", 100).empty());
    CHECK(removed("fractions(2)", 100, "fractions(2)", 100).empty());
    CHECK(removed("fractions(2)", 100, "fractions(2)", 400) == Steps{50});
    CHECK(removed_by_change(present, {}, 100, keep("last(9)"), 100).value() == Steps{10});
    CHECK(removed_by_change(present, keep("last(9)"), 100, {}, 100).value().empty());
  }
}

TEST_SUITE("ckpt/retention/label_store") {
  TEST_CASE("a catalog shows the labels of the saves that are there, and of no others") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20, 30}) add_step(disk, step);
    for (const CheckpointInfo& info : list_checkpoints(disk, kDir).value().checkpoints) CHECK_FALSE(info.label);
    REQUIRE(put_label(disk, kDir, 30, Label::kBad, "nan", "guard").ok());
    const Catalog catalog = list_checkpoints(disk, kDir).value();
    CHECK(catalog.unknown.empty());
    CHECK(catalog.checkpoints[0].label == Label::kNew);
    CHECK(catalog.checkpoints[2].bad());
    CHECK(newest_complete(disk, kDir).value().step == 20);
    CHECK_FALSE(put_label(disk, kDir, 40, Label::kGood, "", "hand").ok());
    CHECK(find_step(disk, kDir, 40).error().message.find("there: 10, 20, 30 (bad)") != std::string::npos);
    Labels labels = read_labels(disk, kDir).value();
    labels.at(30).saved_unix_ms += 1;  // of another save of that step
    REQUIRE(write_labels(disk, kDir, labels).ok());
    CHECK(newest_complete(disk, kDir).value().step == 30);
    disk.bytes_of(kDir / kLabelsName)[0] = std::byte{'x'};
    const auto check_refused = [](const auto& result) {
      REQUIRE_FALSE(result.ok());
      CHECK(result.error().code == ErrorCode::kCorrupt);
      CHECK(result.error().message.find("labels.json: ") != std::string::npos);
    };
    check_refused(newest_complete(disk, kDir));
    check_refused(list_checkpoints(disk, kDir));
    CHECK_FALSE(list_unlabelled(disk, kDir).value().checkpoints[2].label);
    CHECK(find_step(disk, kDir, 40).error().message.find("there: 10, 20, 30") != std::string::npos);
    CHECK_FALSE(put_label(disk, kDir, 30, Label::kBad, "nan", "guard").ok());
  }

  TEST_CASE("held steps stay until they are held no more") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20, 30, 40}) add_step(disk, step);
    REQUIRE(hold_steps(disk, kDir, {10, 99}, "checkpoint.keep was changed").ok());
    CHECK(read_labels(disk, kDir).value().size() == 1);
    REQUIRE(put_label(disk, kDir, 20, Label::kGood, "", "hand").ok());
    CHECK(apply_retention(disk, kDir, {1, {}}, kWriter).value().removed.empty());  // 30 is the candidate
    REQUIRE(put_label(disk, kDir, 30, Label::kSuspect, "", "hand").ok());
    CHECK(apply_retention(disk, kDir, {1, {}}, kWriter).value().removed == Steps{30});
    REQUIRE(hold_steps(disk, kDir, {}, "").ok());
    CHECK(apply_retention(disk, kDir, {1, {}}, kWriter).value().removed == Steps{10});
  }

  TEST_CASE("a label of another save of a step does not count for the present one") {
    MemoryBackend disk;
    add_step(disk, 10);
    const int64_t saved = look_at_checkpoint(disk, kDir, 10).created_unix_ms;
    const LabelEntry other{.label = Label::kBad,
                           .why = "nan",
                           .proved_to = 7,
                           .time = 1,
                           .by = "hand",
                           .saved_unix_ms = saved - 1,
                           .held = "before"};
    REQUIRE(write_labels(disk, kDir, {{10, other}}).ok());
    REQUIRE(hold_steps(disk, kDir, {10}, "now").ok());
    const LabelEntry held = read_labels(disk, kDir).value().at(10);
    CHECK(held.label == Label::kNew);
    CHECK(held.saved_unix_ms == saved);
    CHECK(held.held == "now");
    REQUIRE(write_labels(disk, kDir, {{10, other}}).ok());
    REQUIRE(put_label(disk, kDir, 10, Label::kGood, "fine", "hand").ok());
    const LabelEntry put = read_labels(disk, kDir).value().at(10);
    CHECK(put.held.empty());
    CHECK(put.proved_to == 0);
  }

  TEST_CASE("labels that come with steps are taken where they are of the saves that came") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20, 30}) add_step(disk, step);
    const auto entry = [&](int64_t step, Label label, int64_t later, const char* by = "watch") {
      const int64_t saved = look_at_checkpoint(disk, kDir, step).created_unix_ms + later;
      return std::pair(step, LabelEntry{.label = label, .time = 1, .by = by, .saved_unix_ms = saved});
    };
    // Of 10 the folder had a later save, which is gone; of 30 a person has said something of the save that is there.
    REQUIRE(write_labels(disk, kDir, {entry(10, Label::kBad, 5, "hand"), entry(30, Label::kBad, 0, "hand")}).ok());
    Labels theirs{entry(10, Label::kGood, 0), entry(20, Label::kGood, 1), entry(30, Label::kGood, 0)};
    theirs[40] = {.label = Label::kGood, .by = "watch", .saved_unix_ms = 4};
    REQUIRE(take_labels(disk, kDir, theirs).ok());
    CHECK(read_labels(disk, kDir).value() == Labels{entry(10, Label::kGood, 0), entry(30, Label::kBad, 0, "hand")});
  }

  TEST_CASE("bad ones go first, and again behind those that need them") {
    MemoryBackend start;
    for (const int64_t step : {10, 20, 30}) add_step(start, step);
    REQUIRE(put_label(start, kDir, 10, Label::kBad, "nan", "guard").ok());
    REQUIRE(put_label(start, kDir, 20, Label::kSuspect, "loss", "watch").ok());
    bool fired = true;
    for (int64_t n = 0; fired; ++n) {
      CAPTURE(n);
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n));
      const Result<RetentionReport> report = apply_retention(io, kDir, {1, {}}, kWriter);
      fired = io.fired();
      if (!fired) CHECK(report.value().removed == Steps{10, 20});
      const Steps left = list_names(*disk, kDir).value().steps;
      CHECK((left == Steps{10, 20, 30} || left == Steps{20, 30} || left == Steps{30}));
    }
    REQUIRE(write_file(start, kDir / step_dir_name(20) / kReferencesName, step_dir_name(10) + "\n").ok());
    CHECK(apply_retention(start, kDir, {1, {}}, kWriter).value().removed == Steps{10, 20});
  }

  TEST_CASE("labels and a removal cut off at any call, then power loss: the last good one is never gone") {
    MemoryBackend start;
    for (const int64_t step : {10, 20, 30, 40}) add_step(start, step);
    REQUIRE(put_label(start, kDir, 20, Label::kGood, "", "watch").ok());
    start.power_cycle(0);
    bool fired = true;
    int64_t calls = 0, removed = 0;
    for (int64_t n = 0; fired; ++n) {
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n));
      const auto work = [&]() -> Status {  // 30 is proved, 40 is found bad: then retention
        RT_TRY(put_label(io, kDir, 40, Label::kBad, "nan", "guard"));
        RT_TRY(put_label(io, kDir, 30, Label::kGood, "", "watch"));
        RT_TRY_SET(const RetentionReport report, apply_retention(io, kDir, {1, {}}, kWriter));
        removed = std::ssize(report.removed);
        return {};
      };
      ignore(work(), "that is the test");
      fired = io.fired();
      calls = n;
      for (uint64_t seed = 0; seed < 8; ++seed) {
        CAPTURE(n);
        CAPTURE(seed);
        const auto after = disk->clone();
        after->power_cycle(seed);
        const Result<Labels> labels = read_labels(*after, kDir);
        REQUIRE(labels.ok());  // whole, old or new
        int64_t good = 0;
        for (const CheckpointInfo& info : list_checkpoints(*after, kDir).value().checkpoints)
          good += info.complete && info.label == Label::kGood;
        REQUIRE(good >= 1);
        REQUIRE(newest_complete(*after, kDir).ok());
      }
    }
    CHECK(calls > 20);
    CHECK(removed == 3);  // uncut: 10, 20 and the bad 40
  }

  TEST_CASE("going back moves later steps away, newest first, and two of them stay there") {
    MemoryBackend disk;
    const fs::path away = "/abandoned";
    const auto names = [&] {
      std::vector<std::string> out;
      for (const DirEntry& entry : disk.list(away).value()) out.push_back(entry.name);
      return out;
    };
    for (const int64_t step : {10, 20, 30, 40}) add_step(disk, step);
    CHECK(abandon_steps(disk, kDir, away, 40, kWriter).value().empty());
    CHECK(abandon_steps(disk, kDir, away, 20, kWriter).value() == Steps{30, 40});
    CHECK(names() == std::vector<std::string>{"step-00000030-1", "step-00000040-1"});
    CHECK(list_names(disk, kDir).value().steps == Steps{10, 20});
    add_step(disk, 30);
    CHECK(abandon_steps(disk, kDir, away, 10, kWriter).value() == Steps{20, 30});
    CHECK(names() == std::vector<std::string>{"step-00000020-1", "step-00000030-2"});
    CHECK(list_checkpoints(disk, away).value().checkpoints.empty());  // nobody takes them for checkpoints
  }

  TEST_CASE("going back removes steps that refer to others or that others refer to: their files would not be found") {
    MemoryBackend disk;
    for (const int64_t step : {10, 20, 30, 40}) add_step(disk, step);
    REQUIRE(write_file(disk, kDir / step_dir_name(30) / kReferencesName, step_dir_name(20) + "\n").ok());
    CHECK(abandon_steps(disk, kDir, "/abandoned", 10, kWriter).value() == Steps{20, 30, 40});
    CHECK(list_names(disk, kDir).value().steps == Steps{10});
    const auto there = disk.list("/abandoned").value();
    REQUIRE(there.size() == 1);
    CHECK(there[0].name == "step-00000040-1");
  }

  TEST_CASE("going back, cut off at any call: the step that was asked for is there, and what is left is whole") {
    MemoryBackend start;
    for (const int64_t step : {10, 20, 30, 40}) add_step(start, step);
    REQUIRE(start.make_dir("/abandoned").ok());
    start.power_cycle(1);
    bool fired = true;
    int64_t n = 0;
    for (; fired; ++n) {
      const auto disk = start.clone();
      FaultBackend io(*disk, FaultPlan::stop_at_call(n));
      ignore(
          [&]() -> Status {
            RT_TRY(abandon_steps(io, kDir, "/abandoned", 20, kWriter));
            return {};
          }(),
          "that is the test");
      fired = io.fired();
      for (uint64_t seed = 0; seed < 8; ++seed) {
        CAPTURE(n);
        CAPTURE(seed);
        const auto after = disk->clone();
        after->power_cycle(seed);
        for (const CheckpointInfo& info : list_checkpoints(*after, kDir).value().checkpoints)
          REQUIRE_MESSAGE(info.complete, info.problem);
        REQUIRE(find_step(*after, kDir, 20).ok());
        REQUIRE(abandon_steps(*after, kDir, "/abandoned", 20, kWriter).ok());  // the command again
        REQUIRE(list_names(*after, kDir).value().steps == Steps{10, 20});
      }
    }
    CHECK(n > 8);
  }
}
