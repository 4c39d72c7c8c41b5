// Every message beside the text that agents exchanged before the codec was written (taken from that program), and what
// the codec refuses.
#include "runtime/hosts/message.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <set>
#include <string>
#include <vector>

#include "runtime/json/json.h"
#include "tests/support/ok.h"

using namespace cairn;
using namespace cairn::hosts;

namespace {

constexpr uint64_t kLife = 0xfedcba9876543210;
const Slot kSlot{2, kLife, 5};
const Error kFull{ErrorCode::kNoSpace, "the disk is full"};
const Hello kHello{.index = 1,
                   .name = "h1",
                   .boot_id = "b",
                   .build = "v1",
                   .recipe_hash = "r",
                   .computes = "cpu",
                   .ranks = 2,
                   .kernel_level = 3,
                   .nccl = {{"NCCL_IB_GID_INDEX", "3"}},
                   .gid_types = "RoCE v2"};
const Segment kSegment{.recipe = "{\"name\":\"\u00e4\"}",
                       .past = "p",
                       .init = "{}",
                       .end_step = 40,
                       .hosts = 3,
                       .run_name = "n",
                       .run_id = "i",
                       .lineage = "l",
                       .recipe_json = "{}",
                       .recipe_hash = "h",
                       .trace = "steps=1..2",
                       .time_kernels = true};
const Failure kFailure{.rank = 3,
                       .exit_code = 0,
                       .signal = 9,
                       .hang = true,
                       .message = "m",
                       .failure_class = "out_of_memory",
                       .pid = 812,
                       .seen_ns = int64_t{1} << 60,
                       .last_lines = {"a", "b"}};
const RankState kRank{.rank = 5,
                      .state = "T",
                      .own = {},
                      .beside = {.inside = true, .awaits = 1, .text = "in dp[1,5].reduce"},
                      .pid = 812,
                      .step = 12,
                      .phase = "optimizer",
                      .description = "in dp[1,5]"};

struct Sample {
  Message message;
  std::string kind, body;
};
const std::vector<Sample> kSamples = {
    {Beat{}, "beat", R"({})"},
    {Challenge{"n", "t"}, "challenge", R"({"nonce":"n","token_name":"t"})"},
    {Join{encode_hello(kHello), "n", "p"}, "join",
     R"({"hello":{"boot_id":"b","build":"v1","computes":"cpu","gid_types":"RoCE v2","index":1,"kernel_level":3,"name":"h1","nccl":{"NCCL_IB_GID_INDEX":"3"},"ranks":2,"recipe_hash":"r"},"nonce":"n","proof":"p"})"},
    {Welcome{"{}", "p"}, "welcome", R"({"epoch":"{}","proof":"p"})"},
    {Refused{"the proof of the run's token is wrong"}, "refused", R"({"why":"the proof of the run's token is wrong"})"},
    {Refused{"w", true, "p"}, "refused", R"({"barred":true,"proof":"p","why":"w"})"},
    {Refused{.why = "w", .proof = "p"}, "refused", R"({"proof":"p","why":"w"})"},
    {KeepsCopies{"n"}, "keeps copies", R"({"nonce":"n"})"},
    {OfferCopies{encode_hello(CopyHello{1, 7, true, "n"}), "p"}, "hello",
     R"({"hello":{"epoch":7,"nonce":"n","place":1,"restores":true},"proof":"p"})"},
    {TakesCopies{"p"}, "welcome", R"({"proof":"p"})"},
    {Bank{kSlot, {{R"({"step":5})", {kLife, 1}}}}, "bank",
     R"({"incarnation":18364758544493064720,"ranks":[{"position":"{\"step\":5}","sums":[18364758544493064720,1]}],"slot":2,"step":5})"},
    {SendBank{}, "go", R"({})"},
    {WholeBank{}, "whole", R"({})"},
    {Prepare{kSegment}, "prepare",
     R"({"end_step":40,"hosts":3,"init":"{}","lineage":"l","past":"p","recipe":"{\"name\":\"ä\"}","recipe_hash":"h","recipe_json":"{}","run_id":"i","run_name":"n","time_kernels":true,"trace":"steps=1..2"})"},
    {Begin{kSegment, 2, 1}, "begin",
     R"({"end_step":40,"hosts":3,"init":"{}","leader":1,"lineage":"l","past":"p","place":2,"recipe":"{\"name\":\"ä\"}","recipe_hash":"h","recipe_json":"{}","run_id":"i","run_name":"n","time_kernels":true,"trace":"steps=1..2"})"},
    {Rest{}, "rest", R"({})"},
    {Halt{3}, "halt", R"({"ask":3})"},
    {Halt{0, "h2 was lost"}, "halt", R"({"ask":0,"why":"h2 was lost"})"},
    {Idle{3, {kLife, {{0, 8, 4}, {2, 9, 5}}}}, "idle",
     R"({"ask":3,"memory":{"incarnation":18364758544493064720,"whole":[{"incarnation":8,"slot":0,"step":4},{"incarnation":9,"slot":2,"step":5}]}})"},
    {Idle{3, {kLife, {{0, 8, 4}, {2, 9, 5}}}, Held{-1, 24514, {{1, 8, 4}}}}, "idle",
     R"({"ask":3,"held":{"place":-1,"port":24514,"whole":[{"incarnation":8,"slot":1,"step":4}]},"memory":{"incarnation":18364758544493064720,"whole":[{"incarnation":8,"slot":0,"step":4},{"incarnation":9,"slot":2,"step":5}]}})"},
    {CannotIdle{3, kFull}, "idle", R"({"ask":3,"error":{"code":"no space","message":"the disk is full"}})"},
    {Give{kSlot, {"10.77.0.10", 24513}}, "give",
     R"({"slot":{"incarnation":18364758544493064720,"slot":2,"step":5},"to":{"host":"10.77.0.10","port":24513}})"},
    {Given{}, "given", R"({})"},
    {Given{kFull}, "given", R"({"error":{"code":"no space","message":"the disk is full"}})"},
    {Resume{.incarnation = UINT64_MAX,
            .source = Resume::Source::kDisk,
            .step = int64_t{1} << 53,
            .slot = 2,
            .slot_incarnation = 7,
            .dir = "step-00000012",
            .init = true,
            .foreign = true,
            .starts = {kLife, 1},
            .promised = {12, 9},
            .kernel_level = 1,
            .epoch = 7,
            .peers = {{"10.77.0.10", 24513}, {"h1", 0}}},
     "resume",
     R"({"dir":"step-00000012","epoch":7,"foreign":true,"incarnation":18446744073709551615,"init":true,"kernel_level":1,"peers":[{"host":"10.77.0.10","port":24513},{"host":"h1","port":0}],"promised":[12,9],"slot":2,"slot_incarnation":7,"source":"disk","starts":[18364758544493064720,1],"step":9007199254740992})"},
    {Carried{}, "carried", R"({})"},
    {Carried{kFull}, "carried", R"({"error":{"code":"no space","message":"the disk is full"}})"},
    {Go{kLife}, "go", R"({"incarnation":18364758544493064720})"},
    {End{69, true, "t", Json{{"message", "m"}}}, "end",
     R"({"code":69,"failure":{"message":"m"},"keep":true,"text":"t"})"},
    {End{69, true, "t", Json()}, "end", R"({"code":69,"failure":null,"keep":true,"text":"t"})"},
    {End{.code = 69, .text = "t"}, "end", R"({"code":69,"text":"t"})"},
    {Put{kLife, std::string("a\0b", 3), "\xff\x01"}, "put",
     R"({"incarnation":18364758544493064720,"key":"610062","value":"ff01"})"},
    {Failed{kLife, kFailure}, "failed",
     R"({"failure":{"class":"out_of_memory","exit_code":0,"hang":true,"last_lines":["a","b"],"message":"m","pid":812,"rank":3,"seen_ns":1152921504606846976,"signal":9},"incarnation":18364758544493064720})"},
    {RankError{kLife, kFailure}, "error",
     R"({"failure":{"class":"out_of_memory","exit_code":0,"hang":true,"last_lines":["a","b"],"message":"m","pid":812,"rank":3,"seen_ns":1152921504606846976,"signal":9},"incarnation":18364758544493064720})"},
    {Stopped{kLife}, "stopped", R"({"incarnation":18364758544493064720})"},
    {Left{kLife}, "left", R"({"incarnation":18364758544493064720})"},
    {RankEvent{kLife, 4, {{"event", "pace"}, {"x", {1.5, 2}}}}, "event",
     R"({"event":{"event":"pace","x":[1.5,2]},"incarnation":18364758544493064720,"rank":4})"},
    {Look{}, "look", R"({})"},
    {Ranks{kLife, {kRank}}, "ranks",
     R"({"incarnation":18364758544493064720,"ranks":[{"awaits":-1,"beside":{"awaits":1,"inside":true,"operations":0,"since_ms":0,"text":"in dp[1,5].reduce"},"closed":false,"description":"in dp[1,5]","inside":false,"operations":0,"phase":"optimizer","pid":812,"rank":5,"since_ms":0,"state":"T","step":12,"text":""}]})"},
    {AskStacks{}, "stacks", R"({})"},
    {Stacks{kLife, {{{"rank", 5}, {"stacks", Json::object()}}}}, "stacks",
     R"({"incarnation":18364758544493064720,"stacks":[{"rank":5,"stacks":{}}]})"},
    {AskClock{11}, "clock", R"({"asked_ns":11})"},
    {Clock{11, 12}, "clock", R"({"asked_ns":11,"there_ns":12})"},
    {Kill{5}, "kill", R"({"rank":5})"},
    {Stop{15}, "stop", R"({"signal":15})"},
    {AskSave{"SIGUSR1"}, "ask_save", R"({"by":"SIGUSR1"})"},
    {Copied{kLife, 5, int64_t{1} << 40}, "replicated",
     R"({"bytes":1099511627776,"incarnation":18364758544493064720,"step":5})"},
    {NotCopied{kLife, 5, int64_t{1} << 40, "w"}, "unreplicated",
     R"({"bytes":1099511627776,"incarnation":18364758544493064720,"step":5,"why":"w"})"},
    {AllCopied{kLife, 5}, "replicated", R"({"incarnation":18364758544493064720,"step":5})"},
    {NotAllCopied{kLife, 5}, "unreplicated", R"({"incarnation":18364758544493064720,"step":5})"},
    {Save{5, 2, ".tmp-step-00000005", {{2, 1, kSlot}}}, "save",
     R"({"folder":".tmp-step-00000005","step":5,"try":2,"wards":[{"holder":1,"host":2,"slot":{"incarnation":18364758544493064720,"slot":2,"step":5}}]})"},
    {Save{5, 2, ".tmp-step-00000005", {}}, "save", R"({"folder":".tmp-step-00000005","step":5,"try":2,"wards":[]})"},
    {Begun{5, 2}, "begun", R"({"step":5,"try":2})"},
    {Written{5, 2}, "written", R"({"step":5,"try":2})"},
    {Written{5, 2, 2}, "written", R"({"of":2,"step":5,"try":2})"},
    {NotWritten{5, 2, 2, kFull}, "not_written",
     R"({"error":{"code":"no space","message":"the disk is full"},"of":2,"step":5,"try":2})"},
    {NotWritten{.step = 5, .number = 2, .error = kFull}, "not_written",
     R"({"error":{"code":"no space","message":"the disk is full"},"step":5,"try":2})"},
    {Committed{5, 2}, "committed", R"({"step":5,"try":2})"},
    {Dropped{5, 0, kFull}, "dropped", R"({"error":{"code":"no space","message":"the disk is full"},"step":5,"try":0})"},
    {Promise{kSlot}, "promise", R"({"incarnation":18364758544493064720,"slot":2,"step":5})"},
    {Measure{9, 1, "10.0.0.1", 2, "bf16", "/shared", 20}, "measure",
     R"({"address":"10.0.0.1","dtype":"bf16","folder":"/shared","kernel_level":2,"limit_s":20.0,"round":9,"self":1})"},
    {Measure{9, 1, "10.0.0.1", 2, "bf16", "/shared", 20, true, true, 64, 0, std::vector<int64_t>{0, 2}}, "measure",
     R"({"address":"10.0.0.1","alone":true,"dtype":"bf16","folder":"/shared","gpu_size":64,"gpus":true,"kernel_level":2,"limit_s":20.0,"partner":0,"reach":[0,2],"round":9,"self":1})"},
    {EndMeasure{}, "measure_end", R"({})"},
    {Measured{9, Measured::Alone{10.25, 1.0 / 3, 100, "00ff"}}, "measured",
     R"({"copy_gb_s":0.3333333333333333,"digest":"00ff","event":"alone","matmul_gflops":10.25,"round":9,"write_mb_s":100.0})"},
    {Measured{9, Measured::Alone{.matmul_gflops = 10.25, .copy_gb_s = 1.0 / 3, .digest = "00ff", .failed = "w"}},
     "measured",
     R"({"copy_gb_s":0.3333333333333333,"digest":"00ff","event":"alone","failed":"w","matmul_gflops":10.25,"round":9})"},
    {Measured{9, Measured::Gpus{Json::array(), {"n"}}}, "measured",
     R"({"event":"gpus","gpus":[],"notes":["n"],"round":9})"},
    {Measured{9, Measured::Pair{0, 1e-7, 91, 200, 0, 1}}, "measured",
     R"({"event":"pair","gb_s":1e-07,"partner":0,"resent":1,"round":9,"stalls":0,"trip_us":91.0,"trips":200})"},
    {Measured{9, Measured::Pair{.partner = 0, .failed = "w"}}, "measured",
     R"({"event":"pair","failed":"w","partner":0,"round":9})"},
    {Measured{9, Measured::Reach{2, "no route"}}, "measured",
     R"({"event":"reach","failed":"no route","host":2,"round":9})"},
    {Measured{9, Measured::Reached{}}, "measured", R"({"event":"reached","round":9})"},
    {Measured{9, Measured::Failed{65, "m"}}, "measured", R"({"event":"error","exit_code":65,"message":"m","round":9})"},
    {Measured{9, Measured::Failed{.message = "m"}}, "measured", R"({"event":"error","message":"m","round":9})"},
    {Measured{9, Measured::Ended{""}}, "measured", R"({"event":"ended","failed":"","round":9})"},
    {PutMeasured{9, "key", std::string("\0\xff", 2)}, "measure_put",
     R"({"incarnation":9,"key":"6b6579","value":"00ff"})"},
};

/// Fields whose value another owner reads.
const std::set<std::string> kOpaque = {"join.hello",    "hello.hello",   "event.event",   "end.failure",
                                       "stacks.stacks", "measured.gpus", "measured.notes"};

/// Each place within a body: its pointer, and its name in an error. Nothing below what is opaque.
void walk(const Json& value, const Json::json_pointer& at, const std::string& name, const std::string& kind,
          std::vector<std::pair<Json::json_pointer, std::string>>& out) {
  if (!name.empty()) out.emplace_back(at, name);
  if (kOpaque.contains(kind + "." + name)) return;
  if (value.is_object()) {
    for (const auto& [key, inner] : value.items())
      walk(inner, at / key, name.empty() ? key : name + "." + key, kind, out);
  } else if (value.is_array()) {
    for (size_t k = 0; k < value.size(); ++k) walk(value[k], at / k, fmt::format("{}[{}]", name, k), kind, out);
  }
}
std::vector<std::pair<Json::json_pointer, std::string>> places_of(const Sample& sample) {
  std::vector<std::pair<Json::json_pointer, std::string>> out;
  walk(Json::parse(sample.body), Json::json_pointer(), "", sample.kind, out);
  return out;
}

/// The refusal of a body; empty: it is taken, and then as it was, to the last field.
std::string refused(const std::string& kind, const Json& body) {
  const Result<Message> read = decode(kind, body);
  if (!read.ok()) {
    CHECK(read.error().code == ErrorCode::kCorrupt);
    return read.error().message;
  }
  CHECK(kind_of(read.value()) == kind);
  CHECK(encode(read.value()) == body);
  return "";
}

}  // namespace

TEST_SUITE("runtime/hosts/message") {
  TEST_CASE("each message has the bytes that it always had, and comes back as the same message") {
    std::set<size_t> met;
    for (const auto& [message, kind, body] : kSamples) {
      CAPTURE(body);
      met.insert(message.index());
      CHECK(kind_of(message) == kind);
      CHECK(json_text(encode(message)) == body);
      const Result<Message> read = decode(kind, Json::parse(body));
      REQUIRE_OK(read);
      CHECK(read.value().index() == message.index());
      CHECK(json_text(encode(read.value())) == body);
    }
    CHECK(met.size() == std::variant_size_v<Message>);
  }

  TEST_CASE("a hello comes back as it was") {
    const Result<Hello> host = decode_hello(Json::parse(json_text(encode_hello(kHello))));
    REQUIRE_OK(host);
    CHECK(host.value() == kHello);
    const CopyHello own{1, 7, true, "n"};
    const Result<CopyHello> sender = decode_copy_hello(Json::parse(json_text(encode_hello(own))));
    REQUIRE_OK(sender);
    CHECK(sender.value() == own);
    Json strange = encode_hello(kHello);
    strange["nccl"]["NCCL_ALGO"] = 3;
    CHECK(decode_hello(strange).error().message == "`hello`: field `nccl.NCCL_ALGO` is 3, not text");
    CHECK(decode_copy_hello(Json()).error().message == "`hello`: it is null, not an object");
  }

  TEST_CASE("an unknown kind, and each way in which a field can be wrong, are refused by name") {
    const auto why = [](std::string_view kind, const char* body) {
      const Result<Message> read = decode(kind, Json::parse(body));
      return read.ok() ? "" : read.error().message;
    };
    CHECK(why("hold", "{}") == "an unknown kind, `hold`");
    CHECK(why("\x1b[2J", "{}") == "an unknown kind, `\\x1b[2J`");
    CHECK(why("halt", "[]") == "`halt`: it is [], not an object");
    CHECK(why("halt", "{}") == "`halt`: no field `ask`");
    CHECK(why("halt", R"({"ask":"x"})") == R"(`halt`: field `ask` is "x", not an integer from 0 on)");
    CHECK(why("halt", R"({"ask":-1})") == "`halt`: field `ask` is -1, not an integer from 0 on");
    CHECK(why("halt", R"({"ask":18446744073709551615})") ==
          "`halt`: field `ask` is 18446744073709551615, not an integer from 0 on");
    CHECK(why("halt", R"({"ask":1,"asks":2})") == "`halt`: an unknown field `asks`");
    CHECK(why("halt", R"({"ask":1,"\u001b[2J":2})") == "`halt`: an unknown field `\\x1b[2J`");
    CHECK(why("go", R"({"incarnation":1.5})") == "`go`: field `incarnation` is 1.5, not an integer from 0 on");
    CHECK(why("end", R"({"code":256,"text":""})") == "`end`: field `code` is 256, not an integer from 0 to 255");
    CHECK(why("end", R"({"code":0,"text":"","keep":1})") == "`end`: field `keep` is 1, not true or false");
    CHECK(why("promise", R"({"incarnation":1,"slot":10,"step":1})") ==
          "`promise`: field `slot` is 10, not an integer from 0 to 9");
    CHECK(why("put", R"({"incarnation":1,"key":"","value":""})") ==
          R"(`put`: field `key` is "", not two hexadecimal digits a byte)");
    CHECK(why("put", R"({"incarnation":1,"key":"6","value":""})") ==
          R"(`put`: field `key` is "6", not two hexadecimal digits a byte)");
    CHECK(why("put", R"({"incarnation":1,"key":"6x","value":""})") ==
          R"(`put`: field `key` is "6x", not two hexadecimal digits a byte)");
    CHECK(why("save", R"({"step":1,"try":1,"folder":"f","wards":{}})") == "`save`: field `wards` is {}, not a list");
    CHECK(why("save", R"({"step":1,"try":1,"folder":"f","wards":[3]})") ==
          "`save`: field `wards[0]` is 3, not an object");
    CHECK(
        why("save", R"({"step":1,"try":1,"folder":"f","wards":[{"host":1,"holder":1,"slot":{"slot":1,"step":1}}]})") ==
        "`save`: no field `wards[0].slot.incarnation`");
    CHECK(why("carried", R"({"error":{"code":"odd","message":"m"}})") ==
          R"(`carried`: field `error.code` is "odd", not a code of an error)");
    CHECK(why("measured", R"({"event":"odd","round":1})") == R"(`measured`: field `event` is "odd", which is unknown)");
    CHECK(why("measured", R"({"event":"reached","round":1,"failed":""})") == "`measured`: an unknown field `failed`");
    CHECK(why("ask_save", fmt::format(R"({{"by":[{}3]}})", std::string(4000, ' ')).c_str()) ==
          "`ask_save`: field `by` is [3], not text");
    const std::string text = fmt::format(R"({{"ask":"{}"}})", std::string(4000, 'x'));
    CHECK(why("halt", text.c_str()).size() < 120);
  }

  TEST_CASE("a message without one of its fields is refused by that field's name, where it may not be missing") {
    std::set<std::string> taken, others;
    for (const Sample& sample : kSamples) {
      for (const auto& [at, name] : places_of(sample)) {
        Json body = Json::parse(sample.body);
        if (!body[at.parent_pointer()].is_object()) continue;
        body[at.parent_pointer()].erase(at.back());
        const std::string why = refused(sample.kind, body);
        if (why.empty()) {
          taken.insert(sample.kind + "." + name);
        } else if (why != fmt::format("`{}`: no field `{}`", sample.kind, name)) {
          others.insert(why);
        }
      }
    }
    // Optional fields, and marks of messages that share a kind.
    CHECK(taken ==
          std::set<std::string>{"refused.barred",   "refused.proof",    "halt.why",           "idle.held",
                                "given.error",      "carried.error",    "end.keep",           "end.failure",
                                "written.of",       "not_written.of",   "measure.alone",      "measure.gpus",
                                "measure.gpu_size", "measure.partner",  "measure.reach",      "measured.write_mb_s",
                                "measured.gb_s",    "measured.trip_us", "measured.trips",     "measured.stalls",
                                "measured.resent",  "measured.failed",  "measured.exit_code", "welcome.epoch",
                                "go.incarnation",   "clock.there_ns",   "replicated.bytes"});
    CHECK(others == std::set<std::string>{"`idle`: no field `memory`", "`stacks`: an unknown field `incarnation`",
                                          "`unreplicated`: an unknown field `why`"});
  }

  TEST_CASE("a message with a field of another type is refused by that field's name, or is another right message") {
    int64_t refusals = 0;
    for (const Sample& sample : kSamples) {
      for (const auto& [at, name] : places_of(sample)) {
        for (const Json& other : {Json(), Json("x"), Json(-1), Json(1.5), Json::array(), Json::object(), Json(true),
                                  Json::array({Json()}), Json(UINT64_MAX)}) {
          Json body = Json::parse(sample.body);
          body[at] = other;
          CAPTURE(json_text(body));
          const std::string why = refused(sample.kind, body);
          if (why.empty()) continue;
          ++refusals;
          // The field, or what is missing within it.
          CHECK((why.starts_with(fmt::format("`{}`: field `{}", sample.kind, name)) ||
                 why.starts_with(fmt::format("`{}`: no field `{}.", sample.kind, name))));
        }
      }
    }
    CHECK(refusals > 1000);
  }

  TEST_CASE("a message with one field more is refused by that field's name, at any depth") {
    int64_t refusals = 0;
    for (const Sample& sample : kSamples) {
      const auto check = [&](const Json::json_pointer& at, const std::string& name) {
        Json body = Json::parse(sample.body);
        if (!body[at].is_object() || kOpaque.contains(sample.kind + "." + name)) return;
        body[at]["zz"] = 1;
        const std::string inside = name.empty() ? "zz" : name + ".zz";
        CHECK(refused(sample.kind, body) == fmt::format("`{}`: an unknown field `{}`", sample.kind, inside));
        ++refusals;
      };
      check(Json::json_pointer(), "");
      for (const auto& [at, name] : places_of(sample)) check(at, name);
    }
    CHECK(refusals > std::ssize(kSamples));
  }
}
