// An S3-compatible bucket as a second place. Objects PREFIX/step-NNNNNNNN/FILE; a step is complete exactly when its
// manifest's object is there.
//
// Sent data is checked three times: the signature covers the SHA-256 of each body, Content-MD5 makes the store check
// what it received, and the ETag it gives back must be that MD5 (or the MD5 of the parts' MD5s) where it has that form.
// Whoever wants to know what the store has kept reads it back (copy.h does).
//
// Large files go in parts of a size that depends on the file's alone, so that a later process finds an interrupted
// upload's parts by their numbers, and sends only those that are missing or differ. They go over a few connections at a
// time, with a thread each, unless a rate is asked for; each part under way is in memory.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <future>
#include <map>
#include <set>

#include "ckpt/format/checksum.h"
#include "ckpt/format/names.h"
#include "ckpt/mirror/place.h"
#include "ckpt/mirror/s3_client.h"
#include "ckpt/mirror/s3_sign.h"
#include "ckpt/mirror/s3_xml.h"
#include "ckpt/store/io_backend.h"

namespace cairn::ckpt {
namespace {

constexpr int64_t kMaxParts = 10000;   // of one upload, by S3's rules
constexpr int64_t kMaxPages = 100000;  // of a listing: 10^8 names
constexpr int64_t kMaxLanes = 4;       // parts under way, as long as they are in kLanesBytes together
constexpr int64_t kLanesBytes = int64_t{256} << 20;

struct StoredObject {
  int64_t bytes = 0;
  std::string etag;  // without quotes
};

std::string unquoted(std::string text) {
  text.erase(std::remove(text.begin(), text.end(), '"'), text.end());
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

/// Whether an ETag has the form of an MD5, of one body or of `parts` parts. Encrypted buckets give other things.
bool is_md5_etag(const std::string& etag, size_t parts) {
  const size_t dash = etag.find('-');
  const std::string digits = etag.substr(0, dash);
  if (digits.size() != 32 || digits.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  if (parts == 0) return dash == std::string::npos;
  return dash != std::string::npos && etag.substr(dash + 1) == std::to_string(parts);
}

Result<int64_t> parse_size(const std::string& text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    return Error{ErrorCode::kUnavailable, fmt::format("the store gives a size of \"{}\"", text.substr(0, 40))};
  }
  return value;
}

class S3Place final : public Place {
 public:
  S3Place(std::unique_ptr<S3Client> client, const PlaceOptions& options, std::string bucket, std::string prefix)
      : client_(std::move(client)), options_(options), bucket_(std::move(bucket)), prefix_(std::move(prefix)) {}

  std::string describe() const override {
    return "s3://" + bucket_ + (prefix_.empty() ? "" : "/" + prefix_.substr(0, prefix_.size() - 1));
  }

  Result<std::vector<PlacedStep>> list() override {
    std::map<int64_t, PlacedStep> steps;
    RT_TRY(list_objects(prefix_, [&](const std::string& key, const StoredObject& object) {
      const auto [step, name] = split(key);
      if (!step) return;
      PlacedStep& entry = steps[*step];
      entry.step = *step;
      entry.bytes += object.bytes;
      entry.complete = entry.complete || name == kManifestName;
      entry.files.push_back({name, object.bytes});
    }));
    std::vector<PlacedStep> out;
    for (auto& [step, entry] : steps) out.push_back(std::move(entry));
    return out;
  }

  Status begin(int64_t step) override {
    step_ = step;
    put_.clear();
    present_.clear();
    RT_TRY(list_objects(step_prefix(step), [&](const std::string& key, const StoredObject& object) {
      if (const auto [found, name] = split(key); found == step) present_[name] = object;
    }));
    // Replaced: from here on there is no such checkpoint, until the new one's manifest comes.
    if (present_.contains(std::string(kManifestName))) {
      RT_TRY(remove_object(key_of(step, std::string(kManifestName))));
      present_.erase(std::string(kManifestName));
    }
    return {};
  }

  Result<PutReport> put(int64_t step, SourceFile& source, const Traffic& traffic) override {
    RT_CHECK(step == step_, "put() without begin()");
    put_.insert(source.name());
    const int64_t parts_bytes = part_bytes(source.bytes());
    Result<PutReport> report = source.bytes() <= parts_bytes ? put_whole(step, source, traffic)
                                                             : put_parts(step, source, parts_bytes, traffic);
    if (report.ok()) present_.erase(source.name());  // what is there now is new
    return report;
  }

  Status discard(int64_t step, const std::string& name) override {
    present_.erase(name);
    return remove_object(key_of(step, name));
  }

  Status commit(int64_t step, SourceFile& manifest, const Traffic& traffic) override {
    RT_TRY_SET(const std::vector<std::string> strangers, files_not_put(step));
    for (const std::string& name : strangers) RT_TRY(remove_object(key_of(step, name)));
    RT_TRY_SET(const PutReport sent, put(step, manifest, traffic));
    StreamingHash back;
    const Status read_back = read(
        Of::kComplete, step, manifest.name(), 0,
        [&](std::span<const std::byte> bytes) -> Status {
          back.update(bytes);
          return {};
        },
        traffic);
    if (read_back.ok() && back.digest() == sent.hash) {
      step_ = -1;
      return {};
    }
    ignore(remove_object(key_of(step, manifest.name())), "what cannot be read back must not count as complete");
    if (!read_back.ok()) return read_back;
    return Error{ErrorCode::kIo, fmt::format("s3://{}/{}: what was read back differs from what was sent", bucket_,
                                             key_of(step, manifest.name()))};
  }

  Status read(Of, int64_t step, const std::string& name, int64_t offset, const ByteSink& sink,
              const Traffic& traffic) override {
    int64_t got = 0;
    const ByteSink counting = [&](std::span<const std::byte> bytes) -> Status {
      RT_TRY(sink(bytes));
      got += static_cast<int64_t>(bytes.size());
      if (traffic.on_bytes) traffic.on_bytes(static_cast<int64_t>(bytes.size()));
      return {};
    };
    // A connection that breaks in the middle is no reason to begin anew; one that brings nothing is tried no more.
    for (;;) {
      // It may have broken behind the last byte, and then nothing is left to ask for.
      S3Request request{.method = "GET", .key = key_of(step, name), .end_ok = got > 0};
      const int64_t at = offset + got;
      if (at > 0) request.headers.emplace_back("range", fmt::format("bytes={}-", at));
      const int64_t before = got;
      const Result<S3Response> answer = client_->call(request, traffic, false, &counting);
      if (answer.ok()) {
        const S3Response& response = answer.value();
        if (response.status == 416) return {};
        if (at > 0 && response.status != 206) {
          return Error{ErrorCode::kUnavailable, fmt::format("GET s3://{}/{}: HTTP {} for a part, expected 206", bucket_,
                                                            request.key, response.status)};
        }
        return {};
      }
      const ErrorCode code = answer.error().code;
      if ((code != ErrorCode::kUnavailable && code != ErrorCode::kTimeout) || got == before) return answer.error();
    }
  }

  Status remove(int64_t step) override {
    // The manifest first: without it the rest is rubbish that tidy() knows.
    RT_TRY(remove_object(key_of(step, std::string(kManifestName))));
    std::vector<std::string> keys;
    RT_TRY(list_objects(step_prefix(step), [&](const std::string& key, const StoredObject&) { keys.push_back(key); }));
    for (const std::string& key : keys) RT_TRY(remove_object(key));
    return {};
  }

  Result<std::vector<std::string>> tidy(std::optional<int64_t> keep) override {
    std::vector<std::string> said;
    RT_TRY_SET(const std::vector<PlacedStep> steps, list());
    for (const PlacedStep& step : steps) {
      if (step.complete || step.step == keep) continue;
      RT_TRY(remove(step.step));
      said.push_back(fmt::format("removed an incomplete copy of step {} from {}", step.step, describe()));
    }
    RT_TRY_SET(const std::vector<Upload> uploads, list_uploads(prefix_));
    for (const Upload& upload : uploads) {
      const auto [step, name] = split(upload.key);
      if (!step || step == keep) continue;
      const S3Request request{.method = "DELETE", .key = upload.key, .query = {{"uploadId", upload.id}}};
      RT_TRY_SET(const S3Response gone, client_->call(request, {}, /*missing_ok=*/true));
      static_cast<void>(gone);
      said.push_back(fmt::format("ended an interrupted upload of s3://{}/{}", bucket_, upload.key));
    }
    return said;
  }

  Result<std::optional<std::string>> read_note(const std::string& name) override {
    RT_TRY_SET(S3Response answer, client_->call({.method = "GET", .key = prefix_ + name}, {}, /*missing_ok=*/true));
    if (answer.status == 404) return std::optional<std::string>();
    return std::optional<std::string>(std::move(answer.body));
  }

  Status write_note(const std::string& name, const std::string& text) override {
    const auto bytes = std::as_bytes(std::span(text));
    RT_TRY_SET(
        const S3Response answer,
        client_->call(
            {.method = "PUT", .key = prefix_ + name, .headers = {{"content-md5", base64(md5(bytes))}}, .body = bytes},
            {}));
    static_cast<void>(answer);
    return {};
  }

 private:
  struct Upload {
    std::string key, id, initiated;
  };

  std::string step_prefix(int64_t step) const { return prefix_ + step_dir_name(step) + "/"; }
  std::string key_of(int64_t step, const std::string& name) const { return step_prefix(step) + name; }

  /// Step and file of one of our keys; no step for any other.
  std::pair<std::optional<int64_t>, std::string> split(const std::string& key) const {
    if (key.compare(0, prefix_.size(), prefix_) != 0) return {};
    const std::string rest = key.substr(prefix_.size());
    const size_t slash = rest.find('/');
    if (slash == std::string::npos || !valid_file_name(rest.substr(slash + 1))) return {};
    return {parse_step_dir_name(rest.substr(0, slash)), rest.substr(slash + 1)};
  }

  int64_t part_bytes(int64_t size) const {
    constexpr int64_t kMiB = int64_t{1} << 20;
    const int64_t at_least = (size + kMaxParts - 1) / kMaxParts;
    return at_least <= options_.part_bytes ? options_.part_bytes : (at_least + kMiB - 1) / kMiB * kMiB;
  }

  Result<XmlNode> ask(const S3Request& request, const char* root, const Traffic& traffic = {}) {
    RT_TRY_SET(const S3Response answer, client_->call(request, traffic));
    Result<XmlNode> xml = parse_xml(answer.body);
    const std::string what = fmt::format("{} s3://{}/{}", request.method, bucket_, request.key);
    if (!xml.ok()) {
      return Error{ErrorCode::kUnavailable, fmt::format("{}: not an S3 store's answer: {}", what, xml.error().message)};
    }
    if (xml.value().name != root) {
      return Error{ErrorCode::kUnavailable, fmt::format("{}: not an S3 store's answer: <{}>, expected <{}>", what,
                                                        xml.value().name.substr(0, 40), root)};
    }
    return xml;
  }

  Status list_objects(const std::string& prefix,
                      const std::function<void(const std::string& key, const StoredObject&)>& visit) {
    std::string token;
    for (int64_t page = 0; page < kMaxPages; ++page) {
      S3Request request{.method = "GET", .query = {{"list-type", "2"}, {"prefix", prefix}}};
      if (!token.empty()) request.query.emplace_back("continuation-token", token);
      RT_TRY_SET(const XmlNode answer, ask(request, "ListBucketResult"));
      for (const XmlNode& child : answer.children) {
        if (child.name != "Contents") continue;
        RT_TRY_SET(const int64_t bytes, parse_size(child.get("Size")));
        visit(child.get("Key"), {bytes, unquoted(child.get("ETag"))});
      }
      if (answer.get("IsTruncated") != "true") return {};
      std::string next = answer.get("NextContinuationToken");
      if (next.empty() || next == token) break;
      token = std::move(next);
    }
    return Error{ErrorCode::kUnavailable, fmt::format("listing s3://{}/{}: it does not end", bucket_, prefix)};
  }

  Result<std::vector<Upload>> list_uploads(const std::string& prefix) {
    std::vector<Upload> out;
    std::string key_marker, id_marker;
    for (int64_t page = 0; page < kMaxPages; ++page) {
      S3Request request{.method = "GET", .query = {{"uploads", ""}, {"prefix", prefix}}};
      if (!key_marker.empty()) request.query.emplace_back("key-marker", key_marker);
      if (!id_marker.empty()) request.query.emplace_back("upload-id-marker", id_marker);
      RT_TRY_SET(const XmlNode answer, ask(request, "ListMultipartUploadsResult"));
      for (const XmlNode& child : answer.children) {
        if (child.name == "Upload") out.push_back({child.get("Key"), child.get("UploadId"), child.get("Initiated")});
      }
      if (answer.get("IsTruncated") != "true") return out;
      std::string key = answer.get("NextKeyMarker"), id = answer.get("NextUploadIdMarker");
      if (key.empty() || (key == key_marker && id == id_marker)) break;
      key_marker = std::move(key);
      id_marker = std::move(id);
    }
    return Error{ErrorCode::kUnavailable,
                 fmt::format("listing uploads of s3://{}/{}: it does not end", bucket_, prefix)};
  }

  /// Parts of an interrupted upload that are there.
  Result<std::map<int64_t, StoredObject>> list_parts(const std::string& key, const std::string& id) {
    std::map<int64_t, StoredObject> out;
    std::string marker;
    for (int64_t page = 0; page < kMaxPages; ++page) {
      S3Request request{.method = "GET", .key = key, .query = {{"uploadId", id}}};
      if (!marker.empty()) request.query.emplace_back("part-number-marker", marker);
      RT_TRY_SET(const XmlNode answer, ask(request, "ListPartsResult"));
      for (const XmlNode& child : answer.children) {
        if (child.name != "Part") continue;
        RT_TRY_SET(const int64_t number, parse_size(child.get("PartNumber")));
        RT_TRY_SET(const int64_t bytes, parse_size(child.get("Size")));
        out[number] = {bytes, unquoted(child.get("ETag"))};
      }
      if (answer.get("IsTruncated") != "true") return out;
      std::string next = answer.get("NextPartNumberMarker");
      if (next.empty() || next == marker) break;
      marker = std::move(next);
    }
    return Error{ErrorCode::kUnavailable, fmt::format("listing parts of s3://{}/{}: it does not end", bucket_, key)};
  }

  Status remove_object(const std::string& key) {
    const Result<S3Response> gone = client_->call({.method = "DELETE", .key = key}, {}, /*missing_ok=*/true);
    if (!gone.ok()) return gone.error();
    return {};
  }

  Result<std::vector<std::string>> files_not_put(int64_t step) {
    std::vector<std::string> out;
    RT_TRY(list_objects(step_prefix(step), [&](const std::string& key, const StoredObject&) {
      if (const auto [found, name] = split(key); found == step && !put_.contains(name)) out.push_back(name);
    }));
    return out;
  }

  /// PUT of an object or a part, with its MD5; checks the ETag that comes back.
  Status send(S3Client& client, S3Request request, const std::vector<std::byte>& digest, const Traffic& traffic) {
    request.method = "PUT";
    request.headers.emplace_back("content-md5", base64(digest));
    RT_TRY_SET(const S3Response answer, client.call(request, traffic));
    const auto found = answer.headers.find("etag");
    const std::string etag = found == answer.headers.end() ? std::string() : unquoted(found->second);
    if (is_md5_etag(etag, 0) && etag != hex(digest)) {
      return Error{ErrorCode::kUnavailable,
                   fmt::format("PUT s3://{}/{}: the store received other bytes: ETag {}, sent {}", bucket_, request.key,
                               etag, hex(digest))};
    }
    return {};
  }

  Result<PutReport> put_whole(int64_t step, SourceFile& source, const Traffic& traffic) {
    std::vector<std::byte> data(static_cast<size_t>(source.bytes()));
    RT_TRY(source.read(0, data));
    const std::vector<std::byte> digest = md5(data);
    PutReport report{.hash = hash_bytes(data)};
    const auto present = present_.find(source.name());
    if (present != present_.end() && present->second.bytes == source.bytes() && present->second.etag == hex(digest)) {
      report.reused_bytes = source.bytes();
    } else {
      RT_TRY(send(*client_, {.key = key_of(step, source.name()), .body = data}, digest, traffic));
      report.sent_bytes = source.bytes();
    }
    if (traffic.on_bytes) traffic.on_bytes(source.bytes());
    return report;
  }

  /// Reads the source part by part.
  template <typename Each>
  Status each_part(SourceFile& source, int64_t part_bytes, const Traffic& traffic, const Each& each) {
    std::vector<std::byte> data(static_cast<size_t>(part_bytes));
    int64_t number = 1;
    for (int64_t at = 0; at < source.bytes(); at += part_bytes, ++number) {
      if (traffic.cancelled()) return Error{ErrorCode::kStopped, "the copy was told to stop"};
      const std::span part(data.data(), static_cast<size_t>(std::min(part_bytes, source.bytes() - at)));
      RT_TRY(source.read(at, part));
      RT_TRY(each(number, std::span<const std::byte>(part)));
    }
    return {};
  }

  /// A part under way.
  struct Lane {
    std::vector<std::byte> memory;
    std::span<std::byte> part;
    std::future<Status> sent;  // the last, so that whoever leaves early waits for it before the memory goes
  };

  /// The connection of a lane: that of all else is the first one's.
  Result<S3Client*> client_of(size_t lane) {
    if (lane == 0) return client_.get();
    while (more_clients_.size() < lane) {
      RT_TRY_SET(std::unique_ptr<S3Client> client, S3Client::make(options_, bucket_));
      more_clients_.push_back(std::move(client));
    }
    return more_clients_[lane - 1].get();
  }

  Result<PutReport> put_parts(int64_t step, SourceFile& source, int64_t part_bytes, const Traffic& traffic) {
    const std::string key = key_of(step, source.name());
    const auto parts = static_cast<size_t>((source.bytes() + part_bytes - 1) / part_bytes);
    PutReport report;
    std::vector<std::string> etags;
    std::vector<std::byte> digests;
    StreamingHash hash;

    const auto present = present_.find(source.name());
    if (present != present_.end() && present->second.bytes == source.bytes() &&
        is_md5_etag(present->second.etag, parts)) {
      RT_TRY(each_part(source, part_bytes, traffic, [&](int64_t, std::span<const std::byte> part) -> Status {
        hash.update(part);
        const std::vector<std::byte> digest = md5(part);
        digests.insert(digests.end(), digest.begin(), digest.end());
        return {};
      }));
      if (hex(md5(digests)) + "-" + std::to_string(parts) == present->second.etag) {
        report.reused_bytes = source.bytes();
        report.hash = hash.digest();
        if (traffic.on_bytes) traffic.on_bytes(source.bytes());
        return report;
      }
      hash = StreamingHash();
      digests.clear();
    }

    std::string id;
    std::map<int64_t, StoredObject> there;
    RT_TRY_SET(const std::vector<Upload> uploads, list_uploads(key));
    std::string newest;
    for (const Upload& upload : uploads) {
      if (upload.key != key || upload.id.empty() || (!id.empty() && upload.initiated < newest)) continue;
      id = upload.id;
      newest = upload.initiated;
    }
    if (!id.empty()) {
      RT_TRY_SET(there, list_parts(key, id));
    } else {
      RT_TRY_SET(const XmlNode answer, ask({.method = "POST", .key = key, .query = {{"uploads", ""}}},
                                           "InitiateMultipartUploadResult", traffic));
      id = answer.get("UploadId");
      if (id.empty()) return Error{ErrorCode::kUnavailable, fmt::format("POST s3://{}/{}: no UploadId", bucket_, key)};
    }
    const int64_t most = traffic.max_bytes_per_s > 0 ? 1 : std::clamp(kLanesBytes / part_bytes, int64_t{1}, kMaxLanes);
    std::vector<Lane> lanes(std::min(parts, static_cast<size_t>(most)));
    const auto land = [&](Lane& lane) -> Status {
      if (!lane.sent.valid()) return {};
      RT_TRY(lane.sent.get());
      report.sent_bytes += static_cast<int64_t>(lane.part.size());
      if (traffic.on_bytes) traffic.on_bytes(static_cast<int64_t>(lane.part.size()));
      return {};
    };
    for (size_t k = 0; k < parts; ++k) {
      Lane& lane = lanes[k % lanes.size()];
      RT_TRY(land(lane));
      if (traffic.cancelled()) return Error{ErrorCode::kStopped, "the copy was told to stop"};
      const int64_t at = static_cast<int64_t>(k) * part_bytes, bytes = std::min(part_bytes, source.bytes() - at);
      lane.memory.resize(static_cast<size_t>(part_bytes));
      lane.part = std::span(lane.memory).first(static_cast<size_t>(bytes));
      RT_TRY(source.read(at, lane.part));
      hash.update(lane.part);
      const std::vector<std::byte> digest = md5(lane.part);
      digests.insert(digests.end(), digest.begin(), digest.end());
      etags.push_back(hex(digest));
      const std::string number = std::to_string(k + 1);
      const auto found = there.find(static_cast<int64_t>(k) + 1);
      if (found != there.end() && found->second.bytes == bytes && found->second.etag == etags.back()) {
        report.reused_bytes += bytes;
        if (traffic.on_bytes) traffic.on_bytes(bytes);
        continue;
      }
      RT_TRY_SET(S3Client* const client, client_of(k % lanes.size()));
      lane.sent = std::async(std::launch::async, [this, &lane, &traffic, client, digest, key, number, id] {
        return send(*client, {.key = key, .query = {{"partNumber", number}, {"uploadId", id}}, .body = lane.part},
                    digest, traffic);
      });
    }
    for (Lane& lane : lanes) RT_TRY(land(lane));
    std::string body = "<CompleteMultipartUpload>";
    for (size_t i = 0; i < etags.size(); ++i) {
      body += fmt::format("<Part><PartNumber>{}</PartNumber><ETag>\"{}\"</ETag></Part>", i + 1, etags[i]);
    }
    body += "</CompleteMultipartUpload>";
    const Result<XmlNode> answer =
        ask({.method = "POST", .key = key, .query = {{"uploadId", id}}, .body = std::as_bytes(std::span(body))},
            "CompleteMultipartUploadResult", traffic);
    std::string etag = answer.ok() ? unquoted(answer.value().get("ETag")) : std::string();
    if (!answer.ok()) {
      // Done, but the news of it was lost, and a second try finds no such upload: then the object is there.
      StoredObject object;
      if (is_not_found(answer.error())) {
        RT_TRY(list_objects(key, [&](const std::string& found, const StoredObject& there_now) {
          if (found == key) object = there_now;
        }));
      }
      if (object.bytes != source.bytes() || !is_md5_etag(object.etag, parts)) return answer.error();
      etag = object.etag;
    }
    if (is_md5_etag(etag, parts) && etag != hex(md5(digests)) + "-" + std::to_string(parts)) {
      return Error{ErrorCode::kUnavailable,
                   fmt::format("POST s3://{}/{}: the store put together other bytes: ETag {}", bucket_, key, etag)};
    }
    report.hash = hash.digest();
    return report;
  }

  std::unique_ptr<S3Client> client_;
  std::vector<std::unique_ptr<S3Client>> more_clients_;  // for parts, from the first file on that needs them
  PlaceOptions options_;
  std::string bucket_, prefix_;                  // the prefix is empty or ends in '/'
  int64_t step_ = -1;                            // begun
  std::map<std::string, StoredObject> present_;  // of the begun step, from before
  std::set<std::string> put_;                    // since begin()
};

}  // namespace

Result<std::unique_ptr<Place>> open_s3_place(const PlaceOptions& options) {
  std::string rest = options.path.substr(5);
  const size_t slash = rest.find('/');
  const std::string bucket = rest.substr(0, slash);
  std::string prefix = slash == std::string::npos ? "" : rest.substr(slash + 1);
  while (prefix.ends_with('/')) prefix.pop_back();
  const bool good_bucket =
      bucket.size() >= 3 && bucket.size() <= 63 && std::all_of(bucket.begin(), bucket.end(), [](unsigned char c) {
        return std::isalnum(c) != 0 || c == '-' || c == '.' || c == '_';
      });
  const bool good_prefix = std::all_of(prefix.begin(), prefix.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '.' || c == '_' || c == '/';
  });
  if (!good_bucket || !good_prefix || prefix.starts_with('/') || prefix.find("//") != std::string::npos) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("{}: expected s3://BUCKET/PREFIX with a bucket of 3 to 63 and a prefix of any number of "
                             "letters, digits, - _ . and single /",
                             options.path)};
  }
  if (options.part_bytes < kMinPartBytes || options.part_bytes > kMaxPartBytes) {
    return Error{ErrorCode::kInvalidInput,
                 fmt::format("parts of {} bytes (--part-size): an S3 store takes 5MiB to 5GiB ({} to {} bytes)",
                             options.part_bytes, kMinPartBytes, kMaxPartBytes)};
  }
  RT_TRY_SET(std::unique_ptr<S3Client> client, S3Client::make(options, bucket));
  return std::unique_ptr<Place>(
      std::make_unique<S3Place>(std::move(client), options, bucket, prefix.empty() ? "" : prefix + "/"));
}

}  // namespace cairn::ckpt
